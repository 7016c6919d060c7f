"""`PRNGKey`: random keys that are stored as plain integers."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._core.surface.array import ImplicitArray
from ..._core.tree import static
from ..._core.value import materialise_one
from ..._jax.primitives import find_primitive
from ..axes import Leaf, check_axes


class PRNGKey(ImplicitArray):
    """A random key, or an array of them `[...]`, that stands for JAX's typed keys.

    JAX's `key<fry>[...]` is no array of numbers: NumPy, files and libraries of checkpoints refuse
    it. The leaf of a `PRNGKey` is the array of integers behind it, and which generator they are for
    is metadata; so it may be a part of any state that is saved, averaged over, or sent. Programs
    that draw from typed keys draw the same from it, under `vn.implicit`.

    Splitting and folding in give keys of this type; so do slices, indexing, joins and whatever else
    moves keys and draws nothing. Any of it costs what it costs for typed keys: to wrap the integers
    is free.

    **Arguments:**

    - `data`: typed keys; or the integers behind them, `uint32[..., w]`, where `w` is as the
      generator has it.
    - `impl`: the generator of these integers, `"threefry2x32"` or another that
      `jax.random.key_impl` gives; that of typed keys is known.

    **Raises:** TypeError for what is no array, for integers of another dtype or size, and for
    integers without a generator; ValueError for a generator that JAX does not know.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> key = PRNGKey(jax.random.key(0))
    >>> key, jax.tree.leaves(key)
    (PRNGKey(data=u32[2], impl='threefry2x32'), [Array([0, 0], dtype=uint32)])
    >>> first, second = key.split()
    >>> draw = vn.implicit(lambda key: jax.random.normal(key, (3,)), on_materialise="error")
    >>> bool((draw(first) == jax.random.normal(jax.random.split(jax.random.key(0))[0], (3,))).all())
    True
    """

    metadata_is_meaning: ClassVar[bool] = False  # the dense keys have it in their dtype

    data: Leaf  # uint32[..., w]
    impl: Any = static(default=None)

    def __post_init__(self) -> None:
        if isinstance(self.data, jax.Array) and _is_key(self.data):
            if self.impl is not None:
                raise TypeError(f"typed keys have a generator, and need no impl; got {self.impl!r}")
            object.__setattr__(self, "impl", jax.random.key_impl(self.data))
            object.__setattr__(self, "data", jax.random.key_data(self.data))
        check_axes(self, data="w")
        if self.impl is None:
            raise TypeError(
                "PRNGKey takes typed keys, as jax.random.key gives; or integers and the generator "
                "they are for: PRNGKey(data, 'threefry2x32')"
            )
        self.aval()  # so that integers that do not fit the generator fail here

    def materialise(self) -> Any:
        """The typed keys."""
        return jax.random.wrap_key_data(materialise_one(self.data), impl=self.impl)

    @property
    def dtype(self) -> Any:
        """The dtype of the typed keys, which is none of NumPy's: `key<fry>`."""
        return self.aval().dtype

    def split(self, num: int | tuple[int, ...] = 2) -> "PRNGKey":
        """New keys `[..., num]` or `[..., *num]` of each key, as `jax.random.split` makes them."""
        shape = num if isinstance(num, tuple) else (num,)
        return PRNGKey(find_primitive("random_split").bind(self.materialise(), shape=shape))

    def fold_in(self, data: ArrayLike) -> "PRNGKey":
        """New keys of each key and an integer, as `jax.random.fold_in` makes them."""
        message = jnp.broadcast_to(jnp.uint32(data), self.shape)
        return PRNGKey(find_primitive("random_fold_in").bind(self.materialise(), message))


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _stored(x: Any) -> Any:
    return PRNGKey(x) if _is_key(x) else x


def _as_typed_keys(name: str) -> None:
    primitive = find_primitive(name)

    @register(primitive)
    def _(*operands: PRNGKey | ArrayLike, **params: Any) -> Any:
        out = primitive.bind(*map(materialise_one, operands), **params)
        return list(map(_stored, out)) if primitive.multiple_results else _stored(out)


for _primitive in (
    *("random_bits", "random_clone", "random_fold_in", "random_gamma", "random_split"),
    *("random_unwrap", "broadcast_in_dim", "concatenate", "dynamic_slice", "dynamic_update_slice"),
    *("eq", "gather", "ne", "reshape", "rev", "scatter", "select_n", "slice", "split", "squeeze"),
    *("stack", "transpose", "unstack"),
):
    _as_typed_keys(_primitive)
