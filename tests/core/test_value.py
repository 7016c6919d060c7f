"""Implicit arrays as dataclasses, pytrees and array-like objects."""

import copy
import dataclasses
import pickle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.array_types import Diagonal, Lora, Tagged, assert_close, by_numpy, lora
from support.every_type import EVERY_TYPE, plain, value

import veneer as vn

W = lora(arrays.key(0), (4, 6))
DENSE = arrays.array(by_numpy(W))


def test_a_subclass_is_a_frozen_dataclass():
    assert dataclasses.is_dataclass(Lora)
    assert [f.name for f in dataclasses.fields(Lora)] == ["w", "a", "b", "scale"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        W.scale = 2.0


def test_leaves_have_keys_and_static_fields_are_metadata():
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(W)]
    assert paths == [".w", ".a", ".b"]
    assert jax.tree.structure(W) == jax.tree.structure(dataclasses.replace(W, w=W.w * 2))
    assert jax.tree.structure(W) != jax.tree.structure(dataclasses.replace(W, scale=3.0))


def test_unflatten_takes_placeholders():
    assert jax.tree.map(lambda x: object(), W).scale == 0.5
    assert jax.tree.map(lambda x: None, W).w is None


def test_shape_and_dtype_follow_from_materialise():
    assert (W.shape, W.dtype, W.ndim, W.size) == ((4, 6), jnp.float32, 2, 24)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), W)
    assert half.dtype == jnp.bfloat16


def test_dtype_follows_the_default_float():
    class Eye(vn.ImplicitArray):
        x: jax.Array

        def materialise(self):
            return jnp.eye(2) * self.x.astype(jnp.result_type(float))

    x = jnp.float32(1)
    assert Eye(x).dtype == jnp.float32
    with jax.enable_x64(True):
        assert Eye(x).dtype == jnp.float64
    assert Eye(x).dtype == jnp.float32


def test_a_materialise_that_returns_itself_raises():
    class Self(vn.ImplicitArray):
        x: jax.Array

        def materialise(self):
            return self

    with pytest.raises(TypeError, match="returns itself"):
        _ = Self(jnp.ones(2)).shape


def test_nbytes_counts_stored_bytes():
    assert W.nbytes == 4 * (4 * 6 + 4 * 2 + 2 * 6)


def test_a_failing_materialise_suggests_aval():
    class Broken(vn.ImplicitArray):
        x: jax.Array

        def materialise(self):
            raise RuntimeError("no dense form")

    with pytest.raises(RuntimeError, match="no dense form") as error:
        _ = Broken(jnp.ones(2)).shape
    assert "define aval()" in "".join(error.value.__notes__)


def test_a_class_with_aval_needs_no_materialise():
    assert Tagged(jnp.ones((2, 3))).shape == (2, 3)


def test_repr_is_one_line_eagerly_and_under_jit():
    expected = "Lora(w=f32[4,6], a=f32[4,2], b=f32[2,6], scale=0.5)"
    assert repr(W) == expected
    seen = []
    jax.make_jaxpr(lambda w: seen.append(repr(w)))(W)
    vn.implicit(lambda w: seen.append(repr(w)))(W)
    assert seen == [expected, f"Implicit<{expected}>"]


def test_materialise_takes_a_tree():
    tree = {"w": W, "b": [jnp.ones(2), None]}
    assert_close(vn.materialise(tree), {"w": DENSE, "b": [jnp.ones(2), None]})


def test_materialise_follows_nested_values():
    class Wrapper(vn.ImplicitArray):
        inner: vn.ImplicitArray

        def materialise(self):
            return self.inner

    assert_close(Wrapper(Wrapper(W)), DENSE)
    assert Wrapper(Wrapper(W)).shape == (4, 6)


OPERATORS = {
    "neg": lambda x: -x,
    "abs": lambda x: abs(x),
    "add": lambda x: x + 1,
    "radd": lambda x: 1 + x,
    "rsub": lambda x: np.ones((4, 6), np.float32) - x,
    "matmul": lambda x: x @ jnp.ones((6, 2)),
    "rmatmul": lambda x: np.ones((2, 4), np.float32) @ x,
    "rpow": lambda x: 2.0**x,
    "divmod": lambda x: divmod(x, 2.0),
    "compare": lambda x: (x > 0) & (x <= 1) | (x == 2),
    "getitem": lambda x: (x[1], x[:, 2], x[..., None, 1:3], x[jnp.array([0, 2])]),
    "len": lambda x: jnp.array(len(x)),
    "iter": lambda x: list(x),
    "T": lambda x: x.T,
    "sum": lambda x: x.sum(axis=0),
    "astype": lambda x: x.astype(jnp.float16),
    "reshape": lambda x: x.reshape(3, -1),
    "numpy": lambda x: jnp.asarray(np.asarray(x)),
    "float": lambda x: jnp.float32(float(x[0, 0])),
    "bool": lambda x: jnp.array(bool(x[0, 0])),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_and_methods_outside_implicit_agree(name):
    assert_close(OPERATORS[name](W), OPERATORS[name](DENSE))


def test_truth_of_several_elements_raises():
    with pytest.raises(ValueError, match="ambiguous"):
        bool(W)


def test_implicit_arrays_are_not_hashable():
    with pytest.raises(TypeError, match="unhashable"):
        hash(W)


def test_fields_can_have_the_names_of_array_methods():
    class Normal(vn.ImplicitArray):
        mean: jax.Array
        std: jax.Array
        shape: tuple[int, ...] = vn.static(default=())

        def materialise(self):
            return self.mean + self.std

    value = jax.tree.map(lambda x: x + 1, Normal(jnp.ones(2), jnp.ones(2), (2,)))
    assert_close(value.mean, jnp.full(2, 2.0))
    assert_close(value + 0, jnp.full(2, 4.0))
    assert value.shape == (2,)


def test_a_class_can_be_decorated_as_a_dataclass_again():
    @dataclasses.dataclass(frozen=True)
    class Twice(vn.ImplicitArray):
        x: jax.Array
        name: str = vn.static(default="n")
        tags: tuple[str, ...] = vn.static(default_factory=tuple)

        def materialise(self):
            return self.x

    assert jax.tree.leaves(Twice(1.0)) == [1.0]


def test_a_class_that_registers_itself_keeps_its_registration():
    class Pair(NamedTuple):
        x: jax.Array

    class Own(vn.ImplicitArray):
        x: jax.Array

        def materialise(self):
            return self.x

    jax.tree_util.register_pytree_node(Own, lambda o: ((o.x,), "mine"), lambda _, c: Own(*c))
    assert "mine" in str(jax.tree.structure(Own(1.0)))


def test_fields_are_inherited():
    class Base(vn.ImplicitArray):
        x: jax.Array
        k: int = vn.static(default=3)

        def materialise(self):
            return self.x * self.k

    class Child(Base):
        y: jax.Array | None = None

    assert_close(Child(jnp.ones(2), 4, jnp.ones(2)) + 0, jnp.full(2, 4.0))
    assert jax.tree.leaves(Child(1.0, 2, 3.0)) == [1.0, 3.0]


def test_a_stated_shape_and_dtype_are_checked():
    x = jnp.ones((2, 3))
    assert Tagged(x, shape=(2, 3), dtype="float32").shape == (2, 3)
    assert Diagonal(jnp.ones(3), shape=[3, 3]).shape == (3, 3)
    with pytest.raises(ValueError, match=r"Diagonal was given shape=\(3,\), .* \(3, 3\)"):
        Diagonal(jnp.ones(3), shape=(3,))
    with pytest.raises(ValueError, match="Tagged was given dtype=bfloat16"):
        Tagged(x, dtype=jnp.bfloat16)
    with pytest.raises(TypeError, match="unexpected keyword"):
        Tagged(x, size=6)


def test_a_field_named_shape_is_kept():
    class Ones(vn.ImplicitArray):
        shape: tuple[int, ...] = vn.static()

        def materialise(self):
            return jnp.ones(self.shape)

    assert vn.materialise(Ones(shape=(2,))).tolist() == [1.0, 1.0]


COPIES = {
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("name", EVERY_TYPE)
def test_values_are_pickled_and_copied_after_use(name, copied):
    w = value(name)
    vn.explain(lambda w: w[0] if w.ndim else w)(w)
    if name == "Lazy":
        vn.materialise(w)  # which it keeps
        if copied == "pickle":
            pytest.skip("functions of jax.numpy cannot be pickled")
    same = COPIES[copied](w)
    assert (type(same), jax.tree.structure(same)) == (type(w), jax.tree.structure(w))
    assert set(vars(same)) == {f.name for f in dataclasses.fields(w)}
    for one, other in zip(jax.tree.leaves(plain(same)), jax.tree.leaves(plain(w)), strict=True):
        assert (one == other).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: vn.types.Diagonal(jnp.ones(3)),
        lambda: vn.types.Identity(3),
        lambda: vn.types.LowRank(jnp.ones((3, 1)), jnp.ones((1, 3))),
        lambda: vn.types.Toeplitz(jnp.ones(3), jnp.ones(3)),
    ],
)
def test_the_aval_is_not_cached_across_meshes(make):
    """JAX computes types with the mesh of the context, which leaves may not have."""
    mesh = jax.make_mesh((1,), ("i",), (jax.sharding.AxisType.Explicit,))
    value = make()
    with jax.set_mesh(mesh):
        value.aval()
        make().aval()
    assert value.aval().sharding.mesh.empty
    assert make().aval().sharding.mesh.empty
