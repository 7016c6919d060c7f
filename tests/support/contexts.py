"""A context of MLIR for many programs, where JAX makes one for each.

That takes JAX 0.10 some 15 ms, which is two fifths of the time of tests whose programs have been
compiled before. Newer versions take a context again by themselves.
"""

import itertools
import threading

from jax._src.interpreters import mlir

_TIMES = 50  # a context keeps all types and constants that it ever had


def reuse() -> None:
    """Lets the main thread take its context again: MLIR does not lock them."""
    if hasattr(mlir, "_thread_local_context"):
        return
    make = mlir.make_ir_context
    contexts = (context for _ in itertools.count() for context in [make()] * _TIMES)

    def make_ir_context():
        main = threading.current_thread() is threading.main_thread()
        return next(contexts) if main else make()

    mlir.make_ir_context = make_ir_context
