"""`PRNGKey`: random keys stored as integers."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._core.rules import register
from .._core.surface import Leaf, check_axes
from .._core.surface.array import ImplicitArray
from .._core.tree import static
from .._core.value import materialise_one
from .._jax.primitives import find_primitive


class PRNGKey(ImplicitArray):
    """A random key, or an array of keys `[...]`, stored as plain integers.

    JAX's typed keys have the dtype `key<fry>`, which NumPy, files and checkpoint libraries do not
    support. A `PRNGKey` stores the integers of the keys, so it can be saved and sent like other
    arrays. Under `vn.implicit`, a program draws the same numbers as from typed keys, at the same
    cost. The dense array is the array of typed keys.

    **Keeps the structure:** `jax.random.split`, `fold_in` and `clone`, slices, indexing, reshapes,
    transposes, `concatenate`, `stack`, `where` and `.at[...].set`. Random numbers, `key_data` and
    comparisons return dense arrays.

    **Materializes:** other primitives. The result is an array of typed keys.

    **Arguments:**

    - `data`: typed keys `[...]`, or their integers `uint32[..., w]`. The generator determines `w`,
      the number of integers per key.
    - `impl`: the random number generator of the keys, such as `"threefry2x32"`; static.
      `jax.random.key_impl` returns it. Pass it with integers, and omit it for typed keys.

    **Raises:**

    - `TypeError` if `data` is not an array, or its dtype or the size of its last axis does not fit
      the generator.
    - `TypeError` if `impl` is missing for integers, or given for typed keys.
    - `ValueError` if JAX has no generator `impl`.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> key = vn.types.PRNGKey(jax.random.key(0))
    >>> key
    PRNGKey(data=u32[2], impl='threefry2x32')
    >>> first, second = key.split()
    >>> draw = vn.implicit(lambda key: jax.random.normal(key, (3,)))
    >>> bool((draw(first) == jax.random.normal(jax.random.split(jax.random.key(0))[0], (3,))).all())
    True
    """

    metadata_is_meaning: ClassVar[bool] = False  # the dtype of the dense keys has the generator

    data: Leaf  # uint32[..., w]
    impl: Any = static(default=None)

    def __post_init__(self) -> None:
        if isinstance(self.data, jax.Array) and _is_key(self.data):
            if self.impl is not None:
                raise TypeError(
                    f"typed keys already have a generator. Omit impl, got {self.impl!r}"
                )
            object.__setattr__(self, "impl", jax.random.key_impl(self.data))
            object.__setattr__(self, "data", jax.random.key_data(self.data))
        check_axes(self, data="w")
        if self.impl is None:
            raise TypeError(
                "PRNGKey takes typed keys, as jax.random.key returns, or integers and their "
                "generator: PRNGKey(data, 'threefry2x32')"
            )
        self.aval()  # raises if the integers do not fit the generator

    def materialise(self) -> Any:
        """Return the typed keys."""
        return jax.random.wrap_key_data(materialise_one(self.data), impl=self.impl)

    @property
    def dtype(self) -> Any:
        """The dtype of the typed keys, such as `key<fry>`, which NumPy does not have."""
        return self.aval().dtype

    def split(self, num: int | tuple[int, ...] = 2) -> "PRNGKey":
        """Split each key into new keys, like `jax.random.split`.

        **Arguments:**

        - `num`: the number of new keys per key, or a tuple with their shape.

        **Returns:** keys `[..., num]` or `[..., *num]`.
        """
        shape = num if isinstance(num, tuple) else (num,)
        return PRNGKey(find_primitive("random_split").bind(self.materialise(), shape=shape))

    def fold_in(self, data: ArrayLike) -> "PRNGKey":
        """Fold an integer into each key, like `jax.random.fold_in`.

        **Arguments:**

        - `data`: an integer, or an array of integers that broadcasts to the shape of the keys.
        """
        message = jnp.broadcast_to(jnp.uint32(data), self.shape)
        return PRNGKey(find_primitive("random_fold_in").bind(self.materialise(), message))


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


# These primitives run on typed keys.


def _register(name: str) -> None:
    primitive = find_primitive(name)
    store = lambda x: PRNGKey(x) if _is_key(x) else x

    @register(primitive)
    def _(*operands: PRNGKey | ArrayLike, **params: Any) -> Any:
        out = primitive.bind(*map(materialise_one, operands), **params)
        return list(map(store, out)) if primitive.multiple_results else store(out)


for _name in (
    *("random_bits", "random_clone", "random_fold_in", "random_gamma", "random_split"),
    *("random_unwrap", "broadcast_in_dim", "concatenate", "dynamic_slice", "dynamic_update_slice"),
    *("eq", "gather", "ne", "reshape", "rev", "scatter", "select_n", "slice", "split", "squeeze"),
    *("stack", "transpose", "unstack"),
):
    _register(_name)
