"""`Named`: an array with named axes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..._core.transform import redispatch
from ..._core.tree import static
from ..._core.value import aval_of, materialise_one
from ..._jax.tracing import mapped_axis
from ..axes import Leaf, check_axes
from .axis_names import LAWS, Axes, Names
from .label import Label


class Named(Label):
    """An array `[...]` with a name per axis, such as `("batch", "seq")`.

    A program that addresses axes by position runs unchanged. If an operation such as `x + y`
    combines axes with different names, it raises an error when the program is traced. Names cost
    nothing at run time.

    - An axis can have no name (None), like the axes of a dense array. If an operation combines it
      with a named axis, the result has that name. If an axis of size 1 is broadcast, the result has
      the name of the other axis.
    - In a product, the names of two batch axes or two contracted axes must be equal. The other axes
      keep their names, so `x @ x.T` has two axes with the same name.
    - `reshape` keeps the names of unchanged axes. Merged, split and new axes have no name.
    - `vmap` and loops remove the mapped axis and its name. The axis that they add to a result has
      no name. The names of `jax.vmap(vn.implicit(f))` are correct only if `out_axes` is 0.
      `vn.implicit(jax.vmap(f))` works with all `out_axes`.

    **Keeps the structure:** elementwise functions, reductions, transposes, slices, indexing,
    products, cumulative sums, sorts, `concatenate` and `stack`. A result without names is a dense
    array.

    **Materializes:** other primitives, such as `fft`. The result is a dense array without names.

    **Arguments:**

    - `array`: an array `[...]` of any dtype, dense or implicit.
    - `names`: a tuple with a distinct name or None per axis; static.

    **Raises:**

    - `TypeError` if `array` is not an array or already has names, or a name is not a string.
    - `ValueError` if the number of names differs from the rank, or a name occurs twice.
    - `ValueError` in an operation that combines axes with different names.

    >>> import jax.numpy as jnp, veneer as vn
    >>> x = vn.types.Named(jnp.ones((2, 3)), ("batch", "seq"))
    >>> w = vn.types.Named(jnp.ones((3, 4)), ("seq", "out"))
    >>> x @ w, x.mean(0)
    (Named(f32[batch=2, out=4]), Named(f32[seq=3]))
    >>> x * x.rename(seq="time")
    Traceback (most recent call last):
        ...
    ValueError: mul(Named(f32[batch=2, seq=3]), Named(f32[batch=2, time=3])): axis 1 of ...
    """

    array: Leaf  # [...]
    names: Names = static()

    laws: ClassVar[Mapping[str, Callable]] = LAWS

    def __post_init__(self) -> None:
        names: Any = self.names
        if isinstance(names, str) or not all(n is None or isinstance(n, str) for n in names):
            raise TypeError(f"Named takes a tuple of names, strings or None, got {names!r}")
        names = tuple(names)
        for name in names:
            if name is not None and names.count(name) > 1:
                raise ValueError(f"Named takes distinct names, but {name!r} is twice in {names}")
        object.__setattr__(self, "names", names)
        check_axes(self, array="")
        if isinstance(self.array, Named):
            raise TypeError(
                f"Named takes an array without names, not {self.array!r}. Use .rename()."
            )
        shape = self.aval().shape
        if len(names) != len(shape):
            raise ValueError(
                f"Named takes a name or None for each axis; got {len(names)} names, {names}, for "
                f"an array of shape {shape}"
            )

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype of the array."""
        return aval_of(self.array)

    def materialise(self) -> Any:
        """Return the dense array without names."""
        return materialise_one(self.array)

    def axis(self, name: str) -> int:
        """Return the position of the axis with this name, for functions that take an `axis`.

        **Raises:** `ValueError` if no axis, or more than one, has this name.
        """
        if self.names.count(name) != 1:
            problem = "several axes have" if name in self.names else "no axis has"
            raise ValueError(f"{problem} the name {name!r} in {self!r}, with names {self.names}")
        return self.names.index(name)

    def order(self, *names: str) -> "Named":
        """Transpose the array so that its axes have these names, in this order.

        **Arguments:**

        - `names`: the names of all axes, in the new order.

        **Raises:** `ValueError` if `names` does not contain the name of each axis once.
        """
        if len(names) != len(self.names):
            raise ValueError(f"order takes all the names {self.names}, got {names}")
        axes = [self.axis(name) for name in names]
        return redispatch(lambda x: jnp.transpose(x, axes), self)

    def rename(self, **names: str | None) -> "Named":
        """Rename axes: `x.rename(old="new")`. Remove a name with `x.rename(old=None)`.

        **Raises:** `ValueError` if no axis, or more than one, has an old name, or if two axes would
        have the same new name.
        """
        for name in names:
            self.axis(name)
        return Named(self.array, tuple(names.get(n, n) if n else n for n in self.names))

    def __repr__(self) -> str:
        if _rank(self.array) != len(self.names):  # JAX replaced the array by another object
            return f"Named({self.array!r}, {self.names})"
        aval = self.aval()
        dtype = aval.str_short(short_dtypes=True).split("[")[0]
        sizes = map(str, aval.shape)
        axes = [f"{n}={size}" if n else size for n, size in zip(self.names, sizes, strict=True)]
        return f"Named({dtype}[{', '.join(axes)}])"

    @classmethod
    def apply_law(cls, law: Callable, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """Return the arrays without names, and the names of the results.

        **Arguments:**

        - `law`: a function, called as `law(*axes, **params)` with an object per operand that has
          its axis names (`names`) and sizes (`shape`). It returns the names of the result: a tuple,
          or a list of tuples for several results.
        - `values`, `params`: the operands and the parameters of the primitive.
        """
        axes = [
            Axes(x.names if isinstance(x, Named) else (None,) * jnp.ndim(x), tuple(jnp.shape(x)))
            for x in values
        ]
        names = law(*axes, **params)
        if names is NotImplemented:
            return NotImplemented
        return [x.array if isinstance(x, Named) else x for x in values], names

    @classmethod
    def attach(cls, array: Any, metadata: Names) -> Any:
        """Return an array with names, which can occur twice, or the array itself without names."""
        return _unflatten((metadata,), (array,)) if any(metadata) else array


# The pytree. JAX adds and removes leading axes of the leaf, so names belong to the last axes.


class _Metadata(tuple):
    """The static data `(names,)` of a `Named`. Leading axes without a name do not affect equality.

    `jax.jacrev` compares the structures of the input and the result of a `vmap`.
    """

    def _without_leading_axes(self) -> Names:
        (names,) = self
        first = next((i for i, name in enumerate(names) if name is not None), len(names))
        return names[first:]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple):
            return NotImplemented
        return self._without_leading_axes() == _Metadata(other)._without_leading_axes()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._without_leading_axes())


def _unflatten(metadata: tuple[Names], leaves: Iterable[Any]) -> Named:
    """Create a `Named` without checks. If JAX changed the rank of the array, adapt the names."""
    (array,), (names,) = leaves, metadata
    value = object.__new__(Named)
    rank = _rank(array)
    if rank is not None and rank != len(names):
        removed = mapped_axis(array)
        if removed is not None and rank == len(names) - 1:
            names = names[:removed] + names[removed + 1 :]
        names = (None,) * (rank - len(names)) + names[max(len(names) - rank, 0) :]
    value.__dict__.update(array=array, names=names)
    return value


def _rank(array: Any) -> int | None:
    """Return the number of axes, or None for an object that JAX stores in place of an array."""
    leaves = jax.tree.leaves(array)
    if isinstance(array, Named) or not all(hasattr(x, "dtype") for x in leaves):
        return None
    return getattr(array, "ndim", None)


_KEY = jax.tree_util.GetAttrKey("array")

jax.tree_util.register_pytree_with_keys(
    Named,
    lambda x: (((_KEY, x.array),), _Metadata((x.names,))),
    _unflatten,
    lambda x: ((x.array,), _Metadata((x.names,))),
)
