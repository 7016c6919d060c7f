"""A dot_general of a matrix with a dense array, as products of the matrix with vectors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

Axes = Sequence[int]


@dataclass(frozen=True)
class ByVectors:
    """How the axes of a dense array come to be vectors, and those of the result from them.

    A matrix `[*lead, m, n]` takes vectors `[*lead, free, n]` to `[*lead, free, m]`; `lead` of the
    vectors is 1 where the dense array has no such axis.
    """

    transposed: bool  # the matrix's rows are contracted, so that its transpose is applied
    lead: tuple[bool, ...]  # of each leading axis of the matrix: is it a batch axis of both?
    into: tuple[int, ...]  # the axes of the dense array, as (batch, free, contracted)
    out: tuple[int, ...]  # of (lead, free, the other axis of the matrix): the axes of the result

    def vectors(self, x: Any) -> Any:
        """The dense operand as vectors."""
        x = lax.transpose(x, self.into)
        batch, free = self._split(x.shape)
        sizes = iter(batch)
        lead = [next(sizes) if is_batch else 1 for is_batch in self.lead]
        return x.reshape(*lead, math.prod(free), x.shape[-1])

    def result(self, y: Any, x: Any) -> Any:
        """The result of the dot_general, from the products of the matrix with the vectors of x."""
        _, free = self._split([x.shape[i] for i in self.into])
        y = y.reshape(*y.shape[:-2], *free, y.shape[-1])
        return lax.transpose(y, self.out)

    def undo_result(self, y: Any) -> Any:
        """Vectors from a result: the inverse of `result`."""
        y = lax.transpose(y, _inverse(self.out))
        lead = y.shape[: len(self.lead)]
        return y.reshape(*lead, math.prod(y.shape[len(lead) : -1]), y.shape[-1])

    def undo_vectors(self, x: Any, like: Any) -> Any:
        """The dense operand from its vectors: the inverse of `vectors`."""
        x = x.reshape([like.shape[i] for i in self.into])
        return lax.transpose(x, _inverse(self.into))

    def _split(self, shape: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        batch = sum(self.lead)
        return shape[:batch], shape[batch:-1]


def _inverse(permutation: Axes) -> tuple[int, ...]:
    return tuple(permutation.index(i) for i in range(len(permutation)))


def by_vectors(
    dimension_numbers: Any, matrix_ndim: int, dense_ndim: int, *, matrix_first: bool
) -> ByVectors | None:
    """The contraction that a dot_general is, if it is one of either axis of the matrix.

    None if it contracts both, or none, or a leading one.
    """
    contracted, batch = (tuple(map(tuple, pair)) for pair in dimension_numbers)
    if not matrix_first:
        contracted, batch = contracted[::-1], batch[::-1]
    (of_matrix, of_dense), (matrix_batch, dense_batch) = contracted, batch
    leading = range(matrix_ndim - 2)
    if len(of_matrix) != 1 or of_matrix[0] in leading or not set(matrix_batch) <= set(leading):
        return None
    partner = dict(zip(matrix_batch, dense_batch, strict=True))
    free = [i for i in range(dense_ndim) if i not in dense_batch and i not in of_dense]
    # The axes of the products, by where they come from, and the order that dot_general gives.
    names = [("lead", i) for i in leading] + [("free", i) for i in free] + [("other", 0)]
    of_matrix_alone = [("lead", i) for i in leading if i not in partner] + [("other", 0)]
    of_dense_alone = [("free", i) for i in free]
    in_order = [("lead", i) for i in matrix_batch]
    in_order += (
        of_matrix_alone + of_dense_alone if matrix_first else of_dense_alone + of_matrix_alone
    )
    return ByVectors(
        transposed=of_matrix[0] == matrix_ndim - 2,
        lead=tuple(i in partner for i in leading),
        into=(*(partner[i] for i in leading if i in partner), *free, *of_dense),
        out=tuple(names.index(name) for name in in_order),
    )


def accumulated(x: Any, dtype: Any, preferred: Any) -> Any:
    """An operand in the dtype that products are to be summed in."""
    return x if preferred is None else jnp.asarray(x, jnp.promote_types(dtype, preferred))
