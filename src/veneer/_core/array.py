"""`ImplicitArray`: what users subclass."""

import jax
import numpy as np

from .operators import ArrayOperators
from .value import Value


class ImplicitArray(ArrayOperators, Value, abstract=True):
    """An array that looks dense to every JAX program and is something cheaper inside.

    Subclass it with fields for the leaves, `static` fields for metadata, and `materialise`. The
    shape and dtype follow from `materialise`, by abstract evaluation, unless `aval` is overridden.

    Types are *batch-transparent*: every leaf carries the leading axes, which come and go under
    `vmap` and `scan`, so axes are counted from the end.

    At top level `.shape`, `.dtype`, operators and array methods work: each is `implicit` of the
    `jax.numpy` function.

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

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dense array."""
        return self.aval().shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the dense array."""
        return self.aval().dtype

    @property
    def ndim(self) -> int:
        """The number of axes of the dense array."""
        return self.aval().ndim

    @property
    def size(self) -> int:
        """The number of elements of the dense array."""
        return self.aval().size

    @property
    def nbytes(self) -> int:
        """The bytes that are stored: those of the leaves, not of the dense array."""
        leaves = jax.tree.leaves(self)
        arrays = [x if hasattr(x, "dtype") else jax.typeof(x) for x in leaves]  # a Python scalar
        return sum(x.size * x.dtype.itemsize for x in arrays)
