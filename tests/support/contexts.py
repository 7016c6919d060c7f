"""Use one MLIR context for many programs. JAX 0.10 makes a new one for each program.

A context takes 15 ms, two fifths of the time of a test whose programs are in the compilation cache.
Newer versions of JAX reuse contexts themselves.
"""

import itertools
import threading

from jax._src.interpreters import mlir

_TIMES = 50  # a context never frees its types and constants, so it is replaced after 50 programs


def reuse() -> None:
    """Reuse contexts in the main thread. Other threads need their own: MLIR has no locks."""
    if hasattr(mlir, "_thread_local_context"):
        return
    make = mlir.make_ir_context
    contexts = (context for _ in itertools.count() for context in [make()] * _TIMES)

    def make_ir_context():
        main = threading.current_thread() is threading.main_thread()
        return next(contexts) if main else make()

    mlir.make_ir_context = make_ir_context
