"""`ImplicitArray`: what users subclass."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np

from ..._jax.tracing import an_operator_asks, set_operand_of, set_type_of
from ..value import Value
from .operands import as_operand, type_of
from .operators import ArrayOperators


class Shaped:
    """Shape, dtype, rank and size by `aval()`, of a value that stands for an array."""

    @property
    def shape(self: Any) -> tuple[int, ...]:
        """The shape of the dense array."""
        return self.aval().shape

    @property
    def dtype(self: Any) -> np.dtype:
        """The dtype of the dense array."""
        return self.aval().dtype

    @property
    def ndim(self: Any) -> int:
        """The number of axes of the dense array."""
        return self.aval().ndim

    @property
    def size(self: Any) -> int:
        """The number of elements of the dense array."""
        return self.aval().size


class ImplicitArray(ArrayOperators, Shaped, Value, abstract=True):
    """An array that looks dense to every JAX program and is something cheaper inside.

    Subclass it with fields for the leaves, `static` fields for metadata, and `materialise`. The
    shape and dtype follow from `materialise`, by abstract evaluation, unless `aval` is overridden.
    A caller may state them to the constructor, by `shape=` and `dtype=`: where they disagree with
    the dense form, it raises a ValueError.

    Types are *batch-transparent*: every leaf carries the leading axes, which come and go under
    `vmap` and `scan`, so axes are counted from the end.

    A subclass may define or set more, where what follows from `materialise` does not do:

    - `aval()`: the shape and dtype, as a `jax.core.ShapedArray`; a type that refuses to be dense
      must.
    - `default(primitive, values, params)`, a static method: what a primitive does where no rule
      fits, instead of making operands dense.
    - `default_precedence`: of operands of several types with a `default`, that of the highest runs.
    - `partition(spec, shape)`: how its leaves are cut when the dense array is sharded.
    - `leaf_axes()`: which axis of the dense array each axis of each leaf follows; how leaves are
      sliced, moved and sharded follows from it.
    - `storage_name`: how it is stored, `tile 64` say, where notebooks, treescope and `vn.summary`
      show it; `type_name`: the name of the type that they and jaxprs show.
    - `metadata_is_meaning = False`: static fields only say how a value is stored; two that differ
      in them meet at the dense form in a loop or a branch. By default that is refused.
    - `batch_transparent = False`: entries depend on each other (`x / norm(x)`), so a slice of the
      leaves is no slice of the value, and loops make it dense.
    - `is_label = False`: the one leaf, though of its shape and dtype, is not the dense array.
    - `commute_ops = False`: a rule for `(x, y)` of `add`, `mul`, ... does not serve `(y, x)`.
    - `keeps_dtypes = False`: its rules may give other dtypes than the primitives do. Shapes are
      checked all the same.
    - `trainable = ("a", "b")`: the fields that are meant to be trained, for `vn.trainable`; by
      default all of them.

    A type whose one leaf is the dense array itself, with metadata beside it, is a *label*:
    derivatives, loops and shardings keep it, and never ask for the dense form.

    At top level `.shape`, `.dtype`, operators and array methods work: each is `implicit` of the
    `jax.numpy` function. Those functions themselves want `implicit` around them, and say so.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> class Diagonal(vn.ImplicitArray):
    ...     diagonal: jax.Array  # [..., n]
    ...     def materialise(self):
    ...         return self.diagonal[..., None] * jnp.eye(self.diagonal.shape[-1])
    >>> d = Diagonal(jnp.arange(3.0))
    >>> d.shape, d.dtype.name
    ((3, 3), 'float32')
    >>> d
    Diagonal(diagonal=f32[3])
    >>> (d @ jnp.ones(3)).tolist()
    [0.0, 1.0, 2.0]
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.materialise is Value.materialise and hasattr(cls, "materialize"):
            raise TypeError(
                f"{cls.__qualname__} defines materialize, and veneer calls materialise, with an s. "
                "Rename the method. If the class is written for eformer, subclass "
                "veneer.interop.jaximus.ImplicitArray."
            )

    @property
    def __jax_array__(self) -> Callable[[], Any]:
        """What `jax.numpy` asks for, of an object that it is to take for an array."""
        if an_operator_asks():  # ours is next
            raise AttributeError("__jax_array__")
        return partial(as_operand, self)

    #: The names of the fields whose floating leaves are trained; None is all of them.
    trainable: ClassVar[tuple[str, ...] | None] = None

    @property
    def nbytes(self) -> int:
        """The bytes that are stored: those of the leaves, not of the dense array."""
        leaves = jax.tree.leaves(self)
        arrays = [x if hasattr(x, "dtype") else jax.typeof(x) for x in leaves]  # a Python scalar
        return sum(x.size * x.dtype.itemsize for x in arrays)


set_operand_of(ImplicitArray, as_operand)
set_type_of(Value, type_of)
