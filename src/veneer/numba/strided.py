"""Where the entries of a value are in memory, if it is but a view of some: by strides."""

from dataclasses import dataclass

from .index import strides_of
from .kernel import Kernel
from .values import Buffer, Memory, Value


@dataclass(frozen=True)
class Strided:
    """An array whose entry at an index is in memory at `start` and the index times the strides."""

    memory: Memory
    offset: str
    start: int
    strides: tuple[int, ...]

    @property
    def pointer(self) -> Buffer:
        """Its first entry."""
        offset = self.offset
        if self.start:
            offset = str(self.start) if offset == "0" else f"{offset} + {self.start}"
        return Buffer((), self.memory.dtype, self.memory, offset)


def strided(value: Value) -> Strided | None:
    """The strides of a value that is a view of memory, as read by a kernel; None of any other."""
    if isinstance(value, Buffer):
        return Strided(value.memory, value.offset, 0, strides_of(value.shape))
    k = Kernel()
    with k.loops(value.shape) as index:
        text = k.read(value, index)
        access = k.access_of(text)
    if access is None:
        return None
    place = access.place
    variables = [i.terms[0][0] if i.terms else None for i in index]
    if {variable for variable, _ in place.terms} - set(variables):
        return None
    strides = tuple(place.factor(v) if v else 0 for v in variables)
    return Strided(access.memory, access.offset, place.constant, strides)
