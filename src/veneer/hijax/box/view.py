"""Contents of a Box that is an argument: references that are another's."""

from collections.abc import Sequence
from typing import Any

from ..._jax.tracing import current_trace
from .contents import Contents, flat, is_checkpoint, open_leaves
from .traces import enclosing


class View(Contents):
    """Contents of a Box that is an argument of a function that JAX traces: references of another.

    **Arguments:**

    - `refs`: of the leaves, as JAX gives them.
    - `treedef`, `keeps_primals`: of the contents.
    """

    fixed = True

    def __init__(self, refs: Sequence[Any], treedef: Any, keeps_primals: bool):
        super().__init__((), treedef, keeps_primals)
        self.refs = list(refs)

    def read(self) -> list[Any]:
        """The leaves, by the references."""
        self._check()
        return self._read_at_home()

    def set(self, value: Any) -> None:
        """Writes contents that are alike."""
        self._check()
        leaves, treedef = open_leaves(*flat(value), primal=self.keeps_primals)
        if not self._is_alike(leaves, treedef):
            raise self._structure_error(leaves, treedef, [*self._traces_within(), self.home])
        for ref, leaf in zip(self.refs or (), leaves, strict=False):
            self._write_one(ref, leaf)

    def _check(self) -> None:
        self._refuse_condition(self._traces_within())
        self.note_use()
        traces = list(enclosing(current_trace()))
        if not self.keeps_primals and any(map(is_checkpoint, traces)):
            raise NotImplementedError(
                f"{self!r} was made inside a traced function and is an argument of a "
                "jax.checkpoint in it, which would lose the derivative of its contents. Make the "
                "Box outside the function or inside the checkpoint."
            )
