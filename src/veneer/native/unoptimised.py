"""Numba's functions as it has them before LLVM optimises them, for an object file to do that once.

Numba optimises each function, and makes machine code of it, together with all that it calls: again
with each caller. Where only the outermost one is looked for, that is most of the time.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target


@contextmanager
def unoptimised() -> Iterator[None]:
    """Leaves what Numba compiles within as it is, with no machine code.

    Such functions are called by others that are compiled so, and not from Python.
    """
    codegen = cpu_target.target_context.codegen()
    with global_compiler_lock:
        usual = codegen._library_class
        codegen._library_class = _Library
        try:
            yield
        finally:
            codegen._library_class = usual


def modules_of(libraries: Iterable[Any]) -> list[Any]:
    """Returns LLVM's modules of what Numba compiled, and of all that it calls, each once."""
    found: dict[int, Any] = {}
    left = [*libraries]
    while left:
        library = left.pop()
        if id(library) not in found:
            found[id(library)] = library._get_module_for_linking()
            left += library._linking_libraries if isinstance(library, _Library) else ()
    return [*found.values()]


class _Library(CPUCodeLibrary):
    """A function without what it calls. Numba 0.68 has no option for any of this."""

    def finalize(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Returns 0: there is no machine code."""
        return 0

    @property
    def codegen(self) -> Any:
        """Whom Numba tells what a function needs of Python, which is nothing here."""
        return self

    def set_env(self, name: str, environment: Any) -> None:
        pass

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout
