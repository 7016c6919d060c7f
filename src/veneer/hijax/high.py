"""`high`, the one primitive of high types, and the operations that make values of leaves.

An operation is a description that can be hashed, and a function `run` of values: implicit arrays,
dense arrays and tangents. Here are those that types are made with; `operations` has the others, and
`high_rules` what JAX asks of the primitive.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from .._jax.hijax import holds_tracers, make_high_primitive
from .._jax.tracing import current_trace
from .values import Tangent, leaves_of, strong_leaf

if TYPE_CHECKING:
    from .types import HighType, TangentType

high = make_high_primitive("high")


class Operation:
    """What `high` does, on operands of which some are implicit arrays.

    Those with rules of their own override `jvp`, `transpose` and `batch`, which are asked before
    anything is derived from `run`.
    """

    name: Any  # what jaxprs show
    printed: Any = None  # and as parameters
    result_types: Any = None  # if they are known without a look at what it runs

    def run(self, *values: Any) -> list[Any]:
        """The results."""
        raise NotImplementedError

    def rerun(self, *values: Any) -> list[Any]:
        """The results where the operation is met once more, in the trace outside of `implicit`."""
        return self.run(*values)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        """The results and their tangents, or None."""

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> bool:
        """Whether it has added to the accumulators among the operands."""
        del cotangents, operands
        return False

    def batch(self, size: int, name: Any, values: Sequence[Any], dims: Sequence[Any]) -> Any:
        """The results and their axes, or None."""


def apply(operation: Operation, *operands: Any) -> list[Any]:
    """An operation in the current trace: computed in it, or an equation of it."""
    return high.bind(*operands, operation=operation)


@dataclass(frozen=True)
class Pack(Operation):
    """Leaves into a value or a tangent."""

    type: "HighType | TangentType"
    name = "pack"

    def run(self, *leaves: Any) -> list[Any]:
        return [self.type.of_leaves(leaves)]


@dataclass(frozen=True)
class Unpack(Operation):
    """A value or a tangent into its leaves."""

    type: "HighType | TangentType"
    name = "unpack"

    def run(self, value: Any) -> list[Any]:
        return list(map(strong_leaf, leaves_of(value)))


@dataclass(frozen=True)
class Zeros(Operation):
    """The tangent that is zero."""

    type: "TangentType"
    name = "zeros"

    def run(self) -> list[Any]:
        return [self.type.of_arrays([jnp.zeros(a.shape, a.dtype) for a in self.type.lo_ty()])]


@dataclass(frozen=True)
class Add(Operation):
    """The sum of two tangents, leaf by leaf."""

    type: "TangentType"
    name = "add_any"

    def run(self, x: Any, y: Any) -> list[Any]:
        return [Tangent(self.type, [a + b for a, b in zip(x.leaves, y.leaves, strict=True)])]


def packed(type: "HighType | TangentType", arrays: Sequence[Any]) -> Any:
    """A tracer for the value that consists of these arrays."""
    return apply(Pack(type), *type.parts(arrays, packed))[0]


def is_staged(leaves: Sequence[Any]) -> bool:
    """Whether leaves are traced where nothing is lowered.

    JAX raises values there, too: what a branch gives for a residual of another.
    """
    return not current_trace().requires_low and holds_tracers(leaves)
