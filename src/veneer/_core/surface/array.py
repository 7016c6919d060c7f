"""`ImplicitArray`, the class that users subclass."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np

from ..._jax.tracing import set_operand_conversion, set_type_function
from ..value import Value
from . import operands
from .operators import ArrayOperators
from .shown import Shown, nbytes_of


class Shaped:
    """A base class with the attributes of an array that `aval()` determines."""

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


class ImplicitArray(ArrayOperators, Shaped, Shown, Value, abstract=True):
    """An array that looks dense to every JAX program and stores something cheaper.

    Subclass it with annotated fields for arrays, `vn.static` fields for metadata, and a method
    `materialise` that returns the dense array. The subclass is a frozen dataclass and a pytree.
    In its methods, count axes from the end, because `vmap` and `scan` add and remove leading axes.

    The constructor also takes `shape` and `dtype`. It raises `ValueError` if the dense array has
    others. Operators and array methods work without `vn.implicit`. Functions of `jax.numpy`
    must be wrapped: `vn.implicit(jnp.sin)(x)`.

    A subclass may override these methods:

    | method | returns | default |
    |---|---|---|
    | `aval()` | the `jax.core.ShapedArray` of the dense array | traces `materialise` |
    | `default(primitive, values, params)` | the results if no rule fits | materializes operands |
    | `leaf_axes()` | a `vn.LeafAxis` for each axis of each leaf | returns None: not declared |
    | `partition(spec, shape)` | the `PartitionSpec` of each leaf | uses `leaf_axes` |

    `default` is a static method. Override `aval` if `materialise` always raises an error. A
    subclass may also set these class attributes:

    | attribute | default | meaning |
    |---|---|---|
    | `batch_transparent` | True | slicing all leaves along a leading axis slices the dense array |
    | `metadata_is_meaning` | True | loops and branches that change static fields raise an error |
    | `is_label` | None | whether the only leaf is the dense array; None: Veneer tests it |
    | `keeps_dtypes` | True | rules must return the dtype that the primitive has for dense arrays |
    | `commute_ops` | True | a rule for `x + y` also serves `y + x`; also for `mul`, `max`, ... |
    | `compiles_operators` | True | `x + y` outside `vn.implicit` may be compiled with `jax.jit` |
    | `default_precedence` | 0 | the operand type with the highest number runs its `default` |
    | `dense_tangent` | False | with `vn.hijax`, a tangent is one dense array, not one per leaf |
    | `is_cache` | False | True for key-value caches, whose bytes reports count separately |
    | `trainable` | None | the names of the fields that `vn.trainable` selects; None: all |
    | `type_name` | None | the name in jaxprs and notebooks; None: the class name, shortened |
    | `storage_name` | None | how `vn.summary` describes the storage, such as `"tile 64"` |

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
                f"{cls.__qualname__} defines materialize, but veneer calls materialise, with an s. "
                "Rename the method. If the class is written for eformer, subclass "
                "veneer.interop.jaximus.ImplicitArray."
            )

    @property
    def __jax_array__(self) -> Callable[[], Any]:
        """The function that `jax.numpy` calls to convert an operand to an array or a tracer."""
        return operands.conversion.jax_array(self)

    #: The names of the fields whose floating leaves are trained. None means all of them.
    trainable: ClassVar[tuple[str, ...] | None] = None

    @property
    def nbytes(self) -> int:
        """The number of stored bytes: the total size of the leaves."""
        return sum(map(nbytes_of, jax.tree.leaves(self)))


set_operand_conversion(ImplicitArray, lambda value: operands.conversion.convert(value))
set_type_function(Value, lambda value: operands.conversion.type_of(value))
