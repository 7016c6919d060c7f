"""Contractions of arrays whose axes are labelled, as in an einsum: what the rules here are made of.

The axes of `w` are labelled by their numbers; so are those that `a`, `b` and an operand share with
it. Contractions are `lax.dot_general`, and nothing more where no axis is out of place.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._core.transform import redispatch

Label = int | str | tuple[str, int]
Labels = tuple[Label, ...]

RANK = "rank"


def contract(
    x: Any,
    x_labels: Labels,
    y: Any,
    y_labels: Labels,
    summed: Collection[Label],
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: None = None,
) -> tuple[Any, Labels]:
    """The product of two arrays: axes of both are summed over, if said so, or else batch axes.

    Its dtype is the one that is preferred, if that is as wide as the one the two promote to.

    **Returns:** the product, and the labels of its axes: those of the batch, of `x`, and of `y`.
    """
    _check_labels(x, x_labels)
    _check_labels(y, y_labels)
    shared = [label for label in x_labels if label in y_labels]
    contracted = [label for label in shared if label in summed]
    batch = [label for label in shared if label not in summed]
    places = lambda found: ([*map(x_labels.index, found)], [*map(y_labels.index, found)])
    dimension_numbers = places(contracted), places(batch)
    dtype = jnp.result_type(x.dtype, y.dtype)
    preferred = widened(preferred_element_type, dtype)
    dot = partial(
        redispatch,
        lambda x, y: lax.dot_general(
            x, y, dimension_numbers, precision=precision, preferred_element_type=preferred
        ),
    )
    product = dot(_in_dtype(x, dtype), _in_dtype(y, dtype))
    free = [label for label in (*x_labels, *y_labels) if label not in shared]
    return product, (*batch, *free)


def widened(preferred: Any, dtype: Any) -> Any:
    """The dtype that is preferred for a product, if any, but none narrower than its operands'."""
    return None if preferred is None else jnp.promote_types(preferred, dtype)


def arrange(x: Any, labels: Labels, wanted: Sequence[Label]) -> Any:
    """x with its axes in the order that is wanted, and axes of size 1 where it has none."""
    _check_labels(x, labels)
    own = [label for label in wanted if label in labels]
    order = [labels.index(label) for label in own]
    new = [i for i, label in enumerate(wanted) if label not in labels]
    return redispatch(lambda x: lax.expand_dims(lax.transpose(x, order), new), x)


def _check_labels(x: Any, labels: Labels) -> None:
    if x.ndim != len(labels):
        raise ValueError(f"an array of shape {x.shape} does not have the axes {labels}")


def _in_dtype(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else redispatch(lambda x: x.astype(dtype), x)
