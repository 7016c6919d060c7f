"""Compiling and forking, one at a time.

The child of a fork has one thread, and no other is left to unlock what it held: a fork waits for
Numba, LLVM and tracing by JAX, whose locks are not ours.
"""

import os
import threading

#: Held by whoever compiles or loads code; each thread may hold it again.
COMPILING = threading.RLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=COMPILING.acquire,
        after_in_parent=COMPILING.release,
        after_in_child=COMPILING.release,
    )
