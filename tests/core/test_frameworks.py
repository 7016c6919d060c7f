"""Implicit arrays whose class is also an Equinox module or a Flax struct."""

import copy
import dataclasses
import pickle

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.array_types import assert_close

import veneer as vn


class Outer:
    """The outer product of two vectors, times a constant."""

    def materialise(self):
        return self.k * self.u[..., None] * self.v[..., None, :]


class ModuleFirst(Outer, eqx.Module, vn.ImplicitArray):
    u: jax.Array  # [..., m]
    v: jax.Array  # [..., n]
    k: float = vn.static(default=1.0)


class ModuleLast(Outer, vn.ImplicitArray, eqx.Module):
    u: jax.Array
    v: jax.Array
    k: float = vn.static(default=1.0)


@flax.struct.dataclass
class Decorated(Outer, vn.ImplicitArray):
    u: jax.Array
    v: jax.Array
    k: float = vn.static(default=1.0)


class NodeLast(Outer, vn.ImplicitArray, flax.struct.PyTreeNode):
    u: jax.Array
    v: jax.Array
    k: float = vn.static(default=1.0)


class NodeFirst(Outer, flax.struct.PyTreeNode, vn.ImplicitArray):
    u: jax.Array
    v: jax.Array
    k: float = vn.static(default=1.0)


U, V = arrays.arange(1.0, 4.0), arrays.linspace(-1.0, 1.0, 2)
DENSE = arrays.array(2.0 * np.outer(U, V))


@pytest.fixture(params=[ModuleFirst, ModuleLast, Decorated, NodeLast, NodeFirst])
def w(request):
    return request.param(U, V, k=2.0)


def test_framework_types_are_frozen_dataclasses(w):
    assert [f.name for f in dataclasses.fields(w)] == ["u", "v", "k"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        w.k = 3.0
    changed = dataclasses.replace(w, k=3.0)
    assert (type(changed), changed.k, w.k) == (type(w), 3.0, 2.0)


def test_leaves_have_keys_and_static_fields_are_metadata(w):
    leaves = jax.tree_util.tree_leaves_with_path(w)
    assert [(jax.tree_util.keystr(path), leaf.shape) for path, leaf in leaves] == [
        (".u", (3,)),
        (".v", (2,)),
    ]
    assert jax.tree.structure(w) != jax.tree.structure(dataclasses.replace(w, k=3.0))
    same = jax.tree.map(lambda x: x * 2, w)
    assert (type(same), same.k) == (type(w), 2.0)
    assert_close(same.u, U * 2)


COPIES = {
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_framework_types_can_be_pickled_and_copied(w, copied):
    vn.explain(jnp.sin)(w)
    same = copied(w)
    assert (type(same), jax.tree.structure(same)) == (type(w), jax.tree.structure(w))
    assert_close(same, DENSE)


def test_using_a_value_does_not_change_its_structure(w):
    before = jax.tree.structure(w)
    vn.explain(jnp.sin)(w)
    with vn.hijax.enabled():
        gradient = jax.grad(lambda w: jnp.sum(jnp.sin(w)))(w)
    assert jax.tree.structure(w) == before == jax.tree.structure(gradient)
    assert jax.tree.map(jnp.add, w, gradient).shape == w.shape


def test_framework_types_look_dense(w):
    assert (w.shape, w.dtype) == ((3, 2), jnp.float32)
    assert_close(w, DENSE)


@pytest.mark.parametrize(
    "f",
    [lambda w: w + 1, lambda w: 2.0 * w, lambda w: U @ w, lambda w: w[1], lambda w: w.sum(axis=0)],
    ids=["add", "rmul", "rmatmul", "getitem", "sum"],
)
def test_operators_and_methods_agree(w, f):
    assert_close(f(w), f(DENSE))


@pytest.mark.parametrize(
    "wrap",
    [
        vn.implicit,
        lambda f: jax.jit(vn.implicit(f)),
        lambda f: vn.implicit(jax.jit(f)),
        lambda f: lambda w: jax.vmap(vn.implicit(f))(jax.tree.map(lambda x: x[None], w))[0],
    ],
    ids=["eager", "jit outside", "jit inside", "vmap"],
)
def test_transformations_agree(w, wrap):
    assert_close(wrap(lambda w: jnp.sin(U @ w).sum())(w), jnp.sin(U @ DENSE).sum())


def test_jit_returns_a_value_unchanged(w):
    out = jax.jit(vn.implicit(lambda w: w))(w)
    assert (type(out), out.k) == (type(w), 2.0)


def test_framework_types_can_have_rules(w):
    kind = type(w)

    @vn.register("neg")
    def _(x: kind):
        return dataclasses.replace(x, k=-x.k)

    assert isinstance(-w, kind)
    assert_close(-w, -DENSE)


def test_the_gradient_has_the_same_type(w):
    g = jax.grad(vn.implicit(lambda w: jnp.sin(U @ w).sum()))(w)
    dense = jax.grad(lambda u: jnp.sin(U @ (2.0 * u[:, None] * V)).sum())(U)
    assert (type(g), g.k) == (type(w), 2.0)
    assert_close(g.u, dense)


class Layer(eqx.Module):
    w: jax.Array | vn.ImplicitArray

    def __call__(self, x):
        return jnp.tanh(x @ self.w)


def test_implicit_of_a_module_is_a_module_with_the_same_leaves(w):
    x = jnp.ones((4, 3))
    layer = vn.implicit(Layer(w))
    expected, grad = jax.value_and_grad(lambda v: Layer(v.materialise())(x).sum())(w)
    assert jax.tree.structure(layer.fn) == jax.tree.structure(Layer(w))
    assert not jax.make_jaxpr(lambda f, x: f(x))(layer, x).consts  # no weight is a constant
    out, grads = eqx.filter_jit(eqx.filter_value_and_grad(lambda m: m(x).sum()))(layer)
    assert_close(out, expected)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(grad), strict=True):
        assert_close(one, other)
