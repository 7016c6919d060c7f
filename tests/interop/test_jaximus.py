"""Code written for eformer's jaximus runs: every name and argument of its documentation."""

import copy
import dataclasses
import importlib
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from support import arrays
from support.array_types import assert_close

import veneer as vn
from veneer.interop import jaximus
from veneer.interop.jaximus import (
    ArrayLike,
    ImplicitArray,
    OrginArray,
    StaticScalar,
    UninitializedAval,
    aux_field,
    combine_leaf_predicate,
    default_handler,
    flatten_one_implicit_layer,
    implicit,
    implicit_depth,
    is_array,
    leaf_predicate,
    materialize_handler,
    materialize_nested,
    register,
    ste,
    tree_flatten_with_implicit,
    tree_flatten_with_path_with_implicit,
    tree_leaves_with_implicit,
    tree_map_with_implicit,
    tree_map_with_path_with_implicit,
    tree_structure_with_implicit,
    use_implicit,
)

calls: list[Any] = []


@pytest.fixture(autouse=True)
def no_calls():
    calls.clear()


@dataclass
class Codes(ImplicitArray, warn_on_materialize=False):
    """An int8 matrix with a scale per channel, written like eformer's quantized arrays."""

    codes: jax.Array
    scale: jax.Array
    bits: int = aux_field(default=8)

    def materialize(self):
        return (self.codes * self.scale).astype(self.dtype)

    def compute_dtype(self):
        return self.scale.dtype

    @classmethod
    def quantize(cls, x, bits=8):
        scale = jnp.abs(x).max(-2, keepdims=True) / (2 ** (bits - 1) - 1)
        return cls(jnp.round(x / scale).astype(jnp.int8), scale, bits)


@register("dot_general")
def _(x: jax.Array, w: Codes, *, dimension_numbers, **params):
    calls.append("dense @ codes")
    if w.ndim != 2 or dimension_numbers != (((x.ndim - 1,), (0,)), ((), ())):
        return NotImplemented
    product = jnp.tensordot(x, w.codes.astype(x.dtype), ((-1,), (-2,)))
    return product * w.scale


@register(jax.lax.mul_p)
def _(w: Codes, x: ArrayLike, **params):
    calls.append("codes * dense")
    if jnp.ndim(x):
        return NotImplemented
    return Codes(w.codes, w.scale * x, w.bits)


@dataclass
class Lora(ImplicitArray, warn_on_materialize=False):
    """A weight, dense or implicit, and a low-rank update."""

    w: Any
    a: jax.Array
    b: jax.Array

    def materialize(self):
        return jaximus.materialize_nested(self.w, full=True) + self.a @ self.b


@dataclass
class Constant(ImplicitArray, warn_on_materialize=False):
    """An array whose shape is stated, as `materialize` needs it."""

    value: jax.Array

    def materialize(self):
        return jnp.full(self.shape, self.value, self.dtype)


X = arrays.array(np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(3, 4))
W = arrays.array(np.sin(np.arange(20, dtype=np.float32)).reshape(4, 5))


def codes() -> Codes:
    return Codes.quantize(W)


def lora() -> Lora:
    return Lora(W, jnp.cos(jnp.arange(8.0)).reshape(4, 2), jnp.sin(jnp.arange(10.0)).reshape(2, 5))


def loss(x, w):
    return (jnp.tanh(x @ w) ** 2).sum()


# --- A class with only its import changed ------------------------------------------------------


@pytest.mark.parametrize("make", [codes, lora, lambda: Lora(codes(), *lora_parts())])
@pytest.mark.parametrize("compile_", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_values_agree_with_the_dense_program(make, compile_):
    w = make()
    for function in (loss, lambda x, w: x @ w + 1, lambda x, w: w.T[1:].sum(0), jnp.matmul):
        expected = function(X, vn.materialise(w))
        assert_close(compile_(implicit(function))(X, w), expected)


def lora_parts():
    return lora().a, lora().b


@pytest.mark.parametrize("compile_", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients_are_by_the_leaves(compile_):
    w = lora()
    got = compile_(jax.grad(implicit(loss), 1))(X, w)
    expected = jax.grad(lambda w, a, b: loss(X, w + a @ b), (0, 1, 2))(w.w, w.a, w.b)
    assert type(got) is Lora
    assert_close([got.w, got.a, got.b], list(expected))


def test_the_gradient_of_the_program_is_dense():
    w = codes()
    assert_close(implicit(jax.grad(loss, 1))(X, w), jax.grad(loss, 1)(X, w.materialize()))


@pytest.mark.parametrize("compile_", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("order", ["inside", "outside"])
def test_vmap_slices_the_leaves(compile_, order):
    ws = [codes(), Codes.quantize(jnp.cos(W)), Codes.quantize(W**2)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *ws)
    assert stacked.shape == (3, 4, 5)
    f = lambda w: loss(X, w)
    batched = implicit(jax.vmap(f)) if order == "inside" else jax.vmap(implicit(f))
    assert_close(compile_(batched)(stacked), jnp.stack([loss(X, w.materialize()) for w in ws]))


def test_vmap_returns_arrays_of_the_class():
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), codes())
    out = jax.vmap(implicit(lambda w: w * 2))(stacked)
    assert type(out) is Codes
    assert out.shape == (2, 4, 5)
    assert calls == ["codes * dense"]


def test_scan_keeps_arrays_of_the_class():
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), codes())
    step = lambda x, w: (x @ w @ w.T, w)
    x, ws = implicit(lambda x, ws: jax.lax.scan(step, x, ws))(X, stacked)
    dense = codes().materialize()
    assert_close(x, X @ dense @ dense.T @ dense @ dense.T)
    assert type(ws) is Codes


def test_an_argument_of_jit_has_its_class():
    out = jax.jit(lambda w: w)(codes())
    assert type(out) is Codes
    assert (out.shape, out.dtype, out.bits) == ((4, 5), jnp.float32, 8)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_is_equal(duplicate):
    assert_close(duplicate(codes()).materialize(), codes().materialize())


def test_a_pickle_is_equal():
    assert_close(pickle.loads(pickle.dumps(codes())).materialize(), codes().materialize())


def test_replace_makes_another_array():
    replaced = dataclasses.replace(codes(), scale=2 * codes().scale)
    assert_close(replaced.materialize(), 2 * codes().materialize())


def test_operators_work_at_top_level():
    assert_close(X @ codes(), X @ codes().materialize())
    assert_close(lora() + 1, lora().materialize() + 1)
    assert type(codes() * 2) is Codes  # by a rule


# --- Shape and dtype ---------------------------------------------------------------------------


def test_shape_and_dtype_follow_from_materialize():
    w = lora()
    assert (w.shape, w.dtype, w.ndim, w.size) == ((4, 5), jnp.float32, 2, 20)


def test_shape_and_dtype_are_arguments():
    c = Constant(jnp.float32(2), shape=(2, 3), dtype=jnp.bfloat16)
    assert (c.shape, c.dtype) == ((2, 3), jnp.bfloat16)
    assert_close(implicit(lambda c: c + 1)(c), jnp.full((2, 3), 3, jnp.bfloat16))
    with pytest.raises(TypeError, match="positional"):
        Constant(jnp.float32(2), (2, 3))


def test_default_shape_and_dtype_are_used_if_none_are_given():
    @dataclass
    class Halves(Constant, warn_on_materialize=False):
        default_shape = (2,)
        default_dtype = jnp.float16

    c = Halves(jnp.float32(0.5))
    assert (c.shape, c.dtype) == ((2,), jnp.float16)
    assert Halves(jnp.float32(0.5), shape=(3,)).shape == (3,)
    assert (Lora.default_shape, Lora.default_dtype) == (None, None)


def test_compute_shape_and_dtype_are_overridden():
    @dataclass
    class Outer(ImplicitArray, warn_on_materialize=False):
        x: jax.Array
        y: jax.Array

        def compute_shape(self):
            return (*self.x.shape[:-1], self.x.shape[-1], self.y.shape[-1])

        def compute_dtype(self):
            return jnp.bfloat16

        def materialize(self):
            dense = self.x[..., :, None] * self.y[..., None, :]
            return jnp.broadcast_to(dense, self.shape).astype(self.dtype)

    o = Outer(jnp.ones((6, 2)), jnp.ones((6, 3)))
    assert (o.shape, o.dtype) == ((6, 2, 3), jnp.bfloat16)
    assert jax.vmap(implicit(jnp.sum))(o).tolist() == [6.0] * 6  # computed from the slices
    assert Constant(1.0, shape=(), dtype="float32").compute_shape() is None
    assert Constant(1.0, shape=(), dtype="float32").compute_dtype() is None


def test_a_shape_that_is_not_known_raises():
    with pytest.raises(UninitializedAval, match=r"reads self\.shape, .* compute_shape"):
        Constant(jnp.float32(2), dtype=jnp.float32)
    with pytest.raises(UninitializedAval, match=r"reads self\.dtype"):
        Constant(jnp.float32(2), shape=(2,))
    assert issubclass(UninitializedAval, Exception)


def test_a_shape_that_materialize_contradicts_warns():
    with pytest.warns(UserWarning, match=r"shape=\(5, 4\), but materialize returns shape \(4, 5\)"):
        w = Lora(W, *lora_parts(), shape=(5, 4))
    assert w.shape == (4, 5)
    assert_close(implicit(loss)(X, w), loss(X, w.materialize()))


def test_a_dtype_that_materialize_ignores_is_cast_to():
    w = Lora(W, *lora_parts(), dtype=jnp.bfloat16)
    assert w.dtype == jnp.bfloat16
    assert w.materialize().dtype == jnp.float32
    assert_close(implicit(lambda w: w + 1)(w), w.materialize().astype(jnp.bfloat16) + 1)


@dataclass
class Refusing(ImplicitArray, warn_on_materialize=False):
    x: jax.Array

    def materialize(self):
        raise ValueError("never dense")


def test_a_class_may_refuse_to_materialize():
    with pytest.raises(ValueError, match="never dense"):
        Refusing(X)
    r = Refusing(X, shape=X.shape, dtype=X.dtype)
    assert (r.shape, r.dtype) == (X.shape, X.dtype)
    with pytest.raises(ValueError, match="never dense"):
        implicit(jnp.sin)(r)


@pytest.mark.parametrize("compile_", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_stacked_arrays_with_a_stated_shape_gain_axes(compile_):
    @dataclass
    class Flat(ImplicitArray, warn_on_materialize=False):
        entries: jax.Array  # by columns

        def materialize(self):
            return self.entries.reshape(-1).reshape(self.shape[::-1]).T

    dense = jnp.arange(24.0).reshape(2, 3, 4)
    flat = [Flat(x.T.reshape(-1), shape=(3, 4)) for x in dense]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *flat)
    assert stacked.shape == (2, 3, 4)
    assert_close(vn.materialise(stacked), dense)
    f = lambda x: (x @ jnp.ones(4)).sum()
    expected = dense.sum((1, 2))
    assert_close(compile_(jax.vmap(implicit(f)))(stacked), expected)
    assert_close(compile_(implicit(jax.vmap(f)))(stacked), expected)
    assert_close(compile_(implicit(lambda x: jax.lax.map(f, x)))(stacked), expected)
    assert_close(compile_(implicit(lambda x: x[1] + 1))(stacked), dense[1] + 1)


def test_a_stated_shape_that_a_slice_outdates_is_refused():
    c = Constant(jnp.arange(3.0), shape=(3,), dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"leaves of shapes \(\(3,\),\), which are now \(\(\),\)"):
        jax.vmap(implicit(jnp.sum))(c)
    doubled = implicit(jax.vmap(lambda x: 2 * x))(c)
    assert doubled.tolist() == [0.0, 2.0, 4.0]


def test_a_field_named_dtype_may_be_declared_anew():
    @dataclass
    class Stored(ImplicitArray, warn_on_materialize=False):
        x: jax.Array
        dtype: Any = aux_field(default=jnp.float16, kw_only=True)  # noqa: RUF009

        def materialize(self):
            return self.x.astype(self.dtype)

    s = Stored(jnp.arange(3))
    assert (s.dtype, s.aval.dtype) == (jnp.float16, jnp.float16)
    assert_close(implicit(jnp.sin)(s), jnp.sin(jnp.arange(3, dtype=jnp.float16)))
    assert jax.jit(lambda s: s)(Stored(jnp.arange(3), dtype=jnp.float32)).dtype == jnp.float32


def test_the_aval_is_an_attribute():
    aval = jax.core.ShapedArray((4, 5), jnp.dtype("float32"))
    w = codes()
    assert (w.aval.shape, w.aval.dtype, w.aval.ndim) == (aval.shape, aval.dtype, aval.ndim)
    assert w.aval == aval == w.aval() == codes().aval
    assert hash(w.aval) == hash(aval)
    assert repr(w.aval) == repr(aval)


def test_an_own_post_init_may_be_called_first():
    @dataclass
    class Checked(Constant, warn_on_materialize=False):
        def __post_init__(self):
            calls.append("post_init")
            super().__post_init__()

    c = Checked(jnp.float32(2), shape=[2, 3], dtype=jnp.float32)
    assert (calls, c.shape) == (["post_init"], (2, 3))


def test_astype_sets_the_dtype_in_place():
    w = codes()
    assert w.dtype == jnp.float32
    assert w.astype(jnp.bfloat16) is w
    assert w.dtype == w.materialize().dtype == jnp.bfloat16
    assert implicit(jnp.sin)(w).dtype == jnp.bfloat16
    unchanged = lora()
    assert implicit(lambda w: w.astype(jnp.bfloat16))(unchanged).dtype == jnp.bfloat16
    assert unchanged.dtype == jnp.float32


def test_an_assigned_leaf_changes_the_shape():
    w = codes()
    assert w.shape == (4, 5)
    w.codes = w.codes[:2]
    assert w.shape == (2, 5)


# --- The class statement -----------------------------------------------------------------------


def test_commute_ops_decides_if_a_rule_serves_both_orders():
    def define(**keywords):
        @dataclass
        class Marked(ImplicitArray, warn_on_materialize=False, **keywords):
            x: jax.Array

            def materialize(self):
                return self.x

        @register("add")
        def _(x: Marked, y: ArrayLike, **params):
            calls.append("rule")
            return x.x + y

        return Marked

    served = []
    for keywords in ({}, {"commute_ops": True}, {"commute_ops": False}):
        marked = define(**keywords)
        assert marked.commute_ops is keywords.get("commute_ops", True)
        for function in (lambda x: x + 1, lambda x: jnp.add(1, x)):
            calls.clear()
            assert_close(implicit(function)(marked(X)), X + 1)
            served.append(calls == ["rule"])
    assert served == [True, True, True, True, True, False]


def test_a_fallback_warns_at_the_line_of_the_user():
    @dataclass
    class Loud(ImplicitArray):
        x: jax.Array

        def materialize(self):
            return self.x

    assert Loud.warn_on_materialize is True
    with pytest.warns(vn.MaterialiseWarning, match=r"no rule for sin fits Loud:f32\[3,4\]") as seen:
        implicit(jnp.sin)(Loud(X))
    assert seen[0].filename == __file__
    assert issubclass(vn.MaterialiseWarning, UserWarning)


def test_warn_on_materialize_and_warn_on_matter_silence_it(monkeypatch):
    @dataclass
    class Quiet(ImplicitArray, warn_on_materialize=False):
        x: jax.Array

        def materialize(self):
            return self.x

    @dataclass
    class Loud(Quiet):
        pass

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        implicit(jnp.sin)(Quiet(X))
        with pytest.raises(vn.MaterialiseWarning):
            implicit(jnp.sin)(Loud(X))  # the keyword is not inherited
        monkeypatch.setattr(jaximus, "WARN_ON_MATTER", False)
        implicit(jnp.sin)(Loud(X))


@pytest.mark.parametrize(("value", "expected"), [("no", False), ("on", True), ("1", True)])
def test_the_environment_sets_warn_on_matter(value, expected):
    program = "from veneer.interop.jaximus import WARN_ON_MATTER; print(WARN_ON_MATTER)"
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "WARN_ON_MATTER": value},
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == str(expected), run.stderr


def test_a_class_without_materialize_is_abstract():
    @dataclass
    class Incomplete(ImplicitArray):
        x: jax.Array

    with pytest.raises(TypeError, match="materialize"):
        Incomplete(X)


def test_a_class_with_fields_must_be_a_dataclass():
    class Forgotten(ImplicitArray):
        x: jax.Array
        kind: ClassVar[str] = "none"

        def materialize(self):
            return self.x

    with pytest.raises(TypeError, match=r"declares x and is not a dataclass.*dataclass"):
        Forgotten(X)


def test_a_subclass_without_fields_needs_no_decorator():
    class Named(Codes, warn_on_materialize=False):
        kind: ClassVar[str] = "named"

    w = Named(codes().codes, codes().scale)
    assert_close(implicit(loss)(X, w), loss(X, w.materialize()))
    assert "dense @ codes" in calls  # a rule for Codes serves its subclasses


def test_a_field_may_be_an_implicit_array():
    w = Lora(codes(), *lora_parts())
    assert_close(vn.materialise(w), codes().materialize() + w.a @ w.b)
    assert [x.shape for x in jax.tree.leaves(w)] == [(4, 5), (1, 5), (4, 2), (2, 5)]


def test_materialize_may_give_an_implicit_array():
    @dataclass
    class Wrapped(ImplicitArray, warn_on_materialize=False):
        inner: Any

        def materialize(self):
            return self.inner

    w = Wrapped(codes())
    assert (w.shape, w.dtype) == ((4, 5), jnp.float32)
    assert_close(implicit(loss)(X, w), loss(X, codes().materialize()))


# --- Fields and trees --------------------------------------------------------------------------


def test_an_aux_field_is_no_leaf():
    assert [x.dtype.name for x in jax.tree.leaves(codes())] == ["int8", "float32"]
    assert jax.tree.structure(codes()) != jax.tree.structure(dataclasses.replace(codes(), bits=4))


def test_aux_field_takes_metadata_and_keywords_of_field():
    @dataclass
    class Tagged(Constant, warn_on_materialize=False):
        tag: str = aux_field({"doc": "a tag"}, default="x", repr=False)

    field = next(f for f in dataclasses.fields(Tagged) if f.name == "tag")
    assert field.metadata["doc"] == "a tag"
    assert field.metadata["implicit_array_aux"] is True
    assert (field.default, field.repr) == ("x", False)
    assert "doc" not in aux_field().metadata


def test_flattening_gives_keys_and_auxiliary_data():
    w = Codes(codes().codes, codes().scale, shape=(4, 5))
    children, aux = w.tree_flatten_with_keys()
    assert [key.name for key, _ in children] == ["codes", "scale"]
    assert 8 in aux
    again = Codes.tree_unflatten(aux, [leaf for _, leaf in children])
    assert (again.shape, again.bits) == ((4, 5), 8)
    assert_close(again.materialize(), w.materialize())
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(w)]
    assert paths == [".codes", ".scale"]


def test_a_class_may_flatten_itself():
    @dataclass
    class Reversed(Constant, warn_on_materialize=False):
        other: Any = None

        def tree_flatten_with_keys(self):
            children, aux = super().tree_flatten_with_keys()
            return children[::-1], aux

        @classmethod
        def tree_unflatten(cls, aux_data, children):
            return super().tree_unflatten(aux_data, children[::-1])

    r = Reversed(jnp.float32(1), jnp.float32(2), shape=(2,), dtype=jnp.float32)
    assert [x.item() for x in jax.tree.leaves(r)] == [2, 1]
    assert_close(jax.jit(implicit(jnp.sin))(r), jnp.sin(jnp.ones(2)))


@arrays.once
def tree():
    return {"a": codes(), "b": [jnp.ones(3), Lora(codes(), *lora_parts())]}


def test_the_tree_functions_keep_arrays_as_leaves():
    assert [type(x).__name__ for x in tree_leaves_with_implicit(tree())][::2] == ["Codes", "Lora"]
    shapes = tree_map_with_implicit(lambda x: x.shape, tree())
    assert shapes == {"a": (4, 5), "b": [(3,), (4, 5)]}
    sums = tree_map_with_implicit(lambda x, y: (x.shape, y), tree(), shapes)
    assert sums["b"][1] == ((4, 5), (4, 5))
    leaves, structure = tree_flatten_with_implicit(tree())
    assert jax.tree.unflatten(structure, leaves)["a"] is tree()["a"]
    assert tree_structure_with_implicit(tree()) == structure
    pairs, structure = tree_flatten_with_path_with_implicit(tree())
    assert [jax.tree_util.keystr(path) for path, _ in pairs] == ["['a']", "['b'][0]", "['b'][1]"]
    paths = tree_map_with_path_with_implicit(lambda path, x: jax.tree_util.keystr(path), tree())
    assert paths["b"][1] == "['b'][1]"


def test_new_is_leaf_adds_leaves():
    is_list = lambda x: isinstance(x, list)
    leaves = tree_leaves_with_implicit(tree(), new_is_leaf=is_list)
    assert [type(x) for x in leaves] == [Codes, list]


def test_every_tree_function_takes_new_is_leaf():
    is_list = lambda x: isinstance(x, list)
    name = lambda x: type(x).__name__
    assert tree_map_with_implicit(name, tree(), new_is_leaf=is_list) == {"a": "Codes", "b": "list"}
    named = tree_map_with_path_with_implicit(lambda _, x: name(x), tree(), new_is_leaf=is_list)
    assert named == {"a": "Codes", "b": "list"}
    leaves, structure = tree_flatten_with_implicit(tree(), new_is_leaf=is_list)
    assert list(map(name, leaves)) == ["Codes", "list"]
    assert tree_structure_with_implicit(tree(), new_is_leaf=is_list) == structure
    pairs, again = tree_flatten_with_path_with_implicit(tree(), new_is_leaf=is_list)
    assert (len(pairs), again) == (2, structure)


def test_combine_leaf_predicate_wraps_a_tree_function():
    leaves = combine_leaf_predicate(jax.tree_util.tree_leaves, lambda x: isinstance(x, list))
    assert leaves.__name__ == jax.tree_util.tree_leaves.__name__
    assert len(leaves(tree())) == 3
    assert len(leaves(tree(), new_is_leaf=leaf_predicate)) == 2


def test_leaf_predicate_tells_implicit_arrays():
    assert [leaf_predicate(x) for x in (codes(), X, None, 1.0)] == [True, False, False, False]


def test_one_layer_is_flattened():
    leaves, structure = flatten_one_implicit_layer(tree())
    assert [type(x) is Codes for x in leaves] == [False, False, False, True, False, False]
    again = jax.tree.unflatten(structure, leaves)
    assert type(again["b"][1]) is Lora
    assert_close(vn.materialise(again["b"][1]), vn.materialise(tree()["b"][1]))


def test_the_depth_counts_nested_arrays():
    trees = ([X, 1.0], [X, codes()], tree(), Lora(Lora(codes(), *lora_parts()), *lora_parts()))
    assert list(map(implicit_depth, trees)) == [0, 1, 2, 3]


def test_materialize_nested_goes_one_layer_or_all():
    @dataclass
    class Wrapped(ImplicitArray):
        inner: Any

        def materialize(self):
            return self.inner

    w = Wrapped(codes())
    assert type(materialize_nested(w)) is Codes
    assert is_array(materialize_nested(w, full=True))
    assert_close(jax.jit(partial(materialize_nested, full=True))(w), codes().materialize())
    assert materialize_nested(X) is X


def test_materialize_nested_raises_what_materialize_raises():
    with pytest.raises(ValueError, match="never dense"):
        materialize_nested(Refusing(X, shape=X.shape, dtype=X.dtype))


def test_is_array_tells_dense_arrays():
    assert all(map(is_array, (X, np.ones(2), np.float32(1))))
    assert not any(map(is_array, (codes(), 1.0, [1.0], None)))
    jax.jit(lambda x: calls.append(is_array(x)))(X)
    assert calls == [True]


def test_orgin_array_is_the_base_of_all_arrays():
    assert isinstance(X, OrginArray)
    assert isinstance(codes(), OrginArray)
    assert issubclass(ImplicitArray, OrginArray)
    assert not isinstance(np.ones(2), OrginArray)


# --- Rules -------------------------------------------------------------------------------------


def new_type():
    @dataclass
    class Fresh(ImplicitArray, warn_on_materialize=False):
        x: jax.Array

        def materialize(self):
            return self.x

    return Fresh


@pytest.mark.parametrize("primitive", ["sin", jax.lax.sin_p], ids=["name", "primitive"])
@pytest.mark.parametrize("compile_", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_register_takes_a_name_or_a_primitive(primitive, compile_):
    fresh = new_type()

    @register(primitive)
    def rule(x: fresh, **params):
        calls.append("rule")
        return jax.lax.sin_p.bind(x.x, **params)

    assert callable(rule)
    assert_close(compile_(implicit(jnp.sin))(fresh(X)), jnp.sin(X))
    assert calls == ["rule"]


def test_register_takes_a_jitted_function():
    fresh = new_type()

    @register(jnp.linalg.det)
    def _(x: fresh):
        calls.append("rule")
        return jnp.linalg.det(x.x)

    assert_close(implicit(jnp.linalg.det)(fresh(X[:, :3])), jnp.linalg.det(X[:, :3]))
    assert calls == ["rule"]


def test_register_refuses_a_name_that_is_unknown():
    with pytest.raises(ValueError, match="no_such_primitive"):
        register("no_such_primitive")


def test_a_rule_may_take_the_primitive_first():
    fresh = new_type()

    @register("add")
    def _(primitive: Primitive, x: fresh, y: ArrayLike, **params):
        calls.append(primitive.name)
        return primitive.bind(x.x, y, **params)

    @register("exp")
    def _(primitive, x: fresh, **params):
        calls.append(primitive.name)
        return primitive.bind(x.x, **params)

    @register("sub")
    def _(primitive: Any, x: fresh, y, **params):
        calls.append(primitive.name)
        return primitive.bind(x.x, y, **params)

    program = implicit(lambda x: (x + X, jnp.exp(x), x - X))
    for call in (program, jax.jit(program)):
        assert_close(call(fresh(X)), (X + X, jnp.exp(X), X - X))
    assert calls[:3] == ["add", "exp", "sub"]


def test_an_operand_without_annotation_may_be_anything():
    fresh = new_type()

    @register("mul")
    def _(x, y: fresh, **params):
        calls.append(type(x).__name__)
        return jax.lax.mul_p.bind(jnp.asarray(vn.materialise(x)), y.x, **params)

    assert_close(implicit(lambda x, y: x * y)(X, fresh(X)), X * X)
    assert_close(implicit(lambda x, y: x * y)(fresh(X), fresh(X)), X * X)
    assert len(calls) == 2


def test_a_rule_without_annotations_is_for_this_module_alone():
    primitive = jax.lax.bessel_i0e_p

    @register(primitive)
    def _(x, **params):
        calls.append(type(x).__name__)
        return primitive.bind(vn.materialise(x), **params)

    function = implicit(jax.scipy.special.i0e)
    assert_close(function(codes()), jax.scipy.special.i0e(codes().materialize()))
    function(vn.quant.quantize(W, "int8"))
    assert calls == ["Codes"]


def test_any_in_a_union_is_for_this_module_alone():
    fresh = new_type()

    @register("pow")
    def _(primitive: Primitive, x: ArrayLike | fresh | Any, y: ArrayLike | fresh | Any, **params):
        calls.append(type(x).__name__)
        return primitive.bind(*map(vn.materialise, (x, y)), **params)

    exponent = jnp.full((4, 5), 2.0)
    for x in (fresh(W), lora(), vn.quant.quantize(W, "int8")):
        assert_close(implicit(jnp.power)(x, exponent), vn.materialise(x) ** 2)
    assert calls == ["Fresh", "Lora"]


def test_further_operands_are_no_primitive():
    fresh = new_type()

    @register("concatenate")
    def _(x, *rest: fresh, dimension, **params):
        calls.append(len(rest))
        dense = map(vn.materialise, (x, *rest))
        return jax.lax.concatenate(list(dense), dimension)

    got = implicit(lambda *xs: jnp.concatenate(xs))(fresh(X), fresh(X), fresh(X))
    assert_close(got, jnp.concatenate([X, X, X]))
    assert calls == [2]


def test_a_rule_that_never_runs_warns():
    fresh = new_type()
    with pytest.warns(UserWarning, match="concatenate will never run") as seen:

        @register("concatenate")
        def _(primitive: Primitive, operands: Sequence[fresh], **params):
            raise AssertionError

    assert seen[0].filename == __file__
    assert_close(implicit(lambda x: jnp.concatenate([x, x]))(fresh(X)), jnp.concatenate([X, X]))


def test_static_scalar_annotates_scalars():
    assert all(isinstance(x, StaticScalar) for x in (1, 1.0, 1j, True, np.float32(1), np.bool_(1)))
    assert not any(isinstance(x, StaticScalar) for x in (X, np.ones(1), "1", codes()))
    fresh = new_type()

    @register("nextafter")
    def _(x: fresh, y: jax.Array | StaticScalar, **params):
        calls.append("rule")
        return jax.lax.nextafter(x.x, jnp.broadcast_to(y, x.shape))

    assert_close(implicit(jnp.nextafter)(fresh(X), 9.0), jnp.nextafter(X, 9.0))
    assert calls == ["rule"]


COMMON = {
    "dot_general": lambda x: x @ W,
    "add": lambda x: x + X,
    "sub": lambda x: x - X,
    "mul": lambda x: x * X,
    "div": lambda x: x / (X + 2),
    "reshape": lambda x: x.reshape(4, 3),
    "transpose": lambda x: x.T,
    "reduce_sum": lambda x: x.sum(0),
    "reduce_max": lambda x: x.max(),
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
}


@pytest.mark.parametrize("name", COMMON)
def test_common_primitives_can_be_registered_as_strings(name):
    fresh = new_type()

    @register(name)
    def _(primitive: Primitive, x: fresh, *rest: ArrayLike, **params):
        calls.append(primitive.name)
        return default_handler(primitive, x.x, *rest, **params)

    assert_close(implicit(COMMON[name])(fresh(X)), COMMON[name](X))
    assert calls == [name]


def test_orgin_array_annotates_any_array():
    fresh = new_type()

    @register("atan2")
    def _(x: OrginArray, y: fresh, **params):
        calls.append("rule")
        return jax.lax.atan2_p.bind(vn.materialise(x), y.x, **params)

    for x in (X, fresh(X)):
        assert_close(implicit(jnp.arctan2)(x, fresh(X)), jnp.arctan2(X, X))
    assert calls == ["rule", "rule"]


def test_the_rule_of_the_highest_precedence_runs():
    left, right = new_type(), new_type()

    @register("max", precedence=1)
    def _(x: left, y: left | right, **params):
        calls.append("high")
        return jnp.maximum(x.x, y.x)

    @register("max")
    def _(x: left | right, y: right, **params):
        calls.append("low")
        return jnp.maximum(x.x, y.x)

    assert_close(implicit(jnp.maximum)(left(X), right(-X)), jnp.maximum(X, -X))
    assert calls == ["high"]


def test_the_operands_choose_the_rule():
    fresh = new_type()

    @register("rem")
    def _(x: fresh, y: ArrayLike, **params):
        calls.append("left")
        return jax.lax.rem(x.x, y)

    @register("rem")
    def _(x: ArrayLike, y: fresh, **params):
        calls.append("right")
        return jax.lax.rem(x, y.x)

    y = X + 3
    implicit(jax.lax.rem)(fresh(X), y)
    implicit(jax.lax.rem)(X, fresh(y))
    implicit(jax.lax.rem)(fresh(X), fresh(y))  # no rule for two
    assert calls == ["left", "right"]


def test_a_rule_may_return_an_implicit_array():
    out = implicit(lambda w: 2 * w)(codes())
    assert type(out) is Codes
    assert_close(out.materialize(), 2 * codes().materialize())


def test_a_rule_may_give_another_dtype():
    fresh = new_type()

    @register("dot_general")
    def _(x: ArrayLike, w: fresh, **params):
        return (x @ w.x).astype(jnp.bfloat16)

    assert implicit(jnp.matmul)(X, fresh(W)).dtype == jnp.bfloat16


def test_string_annotations_are_read():
    fresh = new_type()

    @register("cos")
    def _(x: "fresh", **params: "no such name"):
        calls.append("rule")
        return jnp.cos(x.x)

    implicit(jnp.cos)(fresh(X))
    assert calls == ["rule"]


def test_a_rule_for_dense_operands_alone_is_refused():
    with pytest.raises(TypeError, match="only dense operands"):

        @register("add")
        def _(x: jax.Array, y: jax.Array, **params):
            return x


def test_use_implicit_is_implicit():
    assert use_implicit is implicit

    @use_implicit
    def linear(x, w):
        """A product."""
        return x @ w

    assert linear.__doc__ == "A product."
    assert_close(linear(X, w=codes()), X @ codes().materialize())
    assert calls == ["dense @ codes"]


def test_jaximus_and_veneer_types_combine():
    w, other = codes(), vn.quant.quantize(W, "int8")
    got = implicit(lambda x, y: x + y)(w, other)
    assert_close(got, w.materialize() + vn.materialise(other))


def custom_jvp(f):
    function = jax.custom_jvp(f)
    function.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return function


def custom_vjp(f):
    function = jax.custom_vjp(f)
    function.defvjp(lambda *args: jax.vjp(f, *args), lambda pull, ct: pull(ct))
    return function


def on_a_mesh(f):
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    specs = {"in_specs": (jax.P(), jax.P()), "out_specs": jax.P()}
    return jax.shard_map(f, mesh=mesh, **specs)


THROUGH = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "shard_map": on_a_mesh,
    "while_loop": lambda f: (
        lambda x, w: jax.lax.fori_loop(0, x.shape[0] - 2, lambda i, _: f(x, w), f(x, w))
    ),
    "scan": lambda f: lambda x, w: jax.lax.scan(lambda c, _: (c, f(x, w)), 0, None, 1)[1][0],
    "pmap": lambda f: lambda x, w: jax.pmap(f, in_axes=(0, None))(x[None], w)[0],
}


@pytest.mark.parametrize("through", THROUGH.values(), ids=THROUGH)
def test_programs_within_programs_meet_the_rules(through):
    f = lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: -(x @ w))
    got = implicit(through(f))(X, codes())
    assert_close(got, f(X, codes().materialize()))
    assert "dense @ codes" in calls


def test_explain_reports_a_fallback_once():
    report = vn.explain(jnp.sin)(lora())
    assert str(report).count("sin(Lora") == 1
    assert "no rule fits" in str(report)


# --- Handlers ----------------------------------------------------------------------------------


def test_default_handler_binds_the_primitive():
    assert_close(default_handler(jax.lax.add_p, X, X), X + X)
    got = default_handler(jax.lax.reduce_sum_p, X, axes=(0,), out_sharding=None)
    assert_close(got, X.sum(0))


@pytest.mark.parametrize("compile_", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_materialize_handler_materializes_first(compile_):
    got = compile_(lambda w: materialize_handler(jax.lax.add_p, w, W, params={}))(lora())
    assert_close(got, lora().materialize() + W)


def test_the_default_handler_of_a_class_does_the_same():
    assert_close(Lora.default_handler(jax.lax.add_p, lora(), W), lora().materialize() + W)
    params = {"axes": (0,), "out_sharding": None}
    got = Lora.default_handler(jax.lax.reduce_sum_p, lora(), params=params)
    assert_close(got, lora().materialize().sum(0))


# --- The straight-through estimator ------------------------------------------------------------


@ste
def quantize(x, bits=8):
    """Quantize."""
    return Codes.quantize(x, bits)


@pytest.mark.parametrize("compile_", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("call", [lambda w: quantize(w, 4), lambda w: quantize(w, bits=4)])
def test_the_estimator_passes_the_gradient_to_the_master_weights(compile_, call):
    train = implicit(lambda w: loss(X, call(w)))
    dense = Codes.quantize(W, 4).materialize()
    value, gradient = compile_(jax.value_and_grad(train))(W)
    assert_close(value, loss(X, dense))
    assert_close(gradient, jax.grad(loss, 1)(X, dense))


def test_the_estimator_gives_an_array_of_the_class():
    w = quantize(W)
    assert type(w) is Codes
    assert_close(w.materialize(), codes().materialize())
    assert quantize.__doc__ == "Quantize."


def test_the_estimator_takes_functions_of_dense_arrays():
    f = ste(lambda x, step=1.0: jnp.round(x / step) * step)
    assert_close(f(X, step=0.5), jnp.round(X / 0.5) * 0.5)
    assert_close(jax.grad(lambda x: f(x, 0.5).sum())(X), jnp.ones_like(X))
    assert_close(jax.vmap(jax.grad(f))(X[0]), jnp.ones(4))


def test_further_arguments_of_the_estimator_have_no_gradient():
    scaled = ste(lambda x, step: Codes.quantize(x * step))
    f = implicit(lambda x, step: loss(X, scaled(x, step)))
    by_x, by_step = jax.grad(f, (0, 1))(W, jnp.float32(2))
    assert_close(by_x, jax.grad(loss, 1)(X, Codes.quantize(2 * W).materialize()))
    assert by_step == 0


# --- The module --------------------------------------------------------------------------------


def test_every_name_is_offered():
    assert not [name for name in jaximus.__all__ if not hasattr(jaximus, name)]


def test_the_spelling_of_eformer_is_refused_by_veneer():
    with pytest.raises(TypeError, match=r"Rename the method.*veneer\.interop\.jaximus"):

        class Spelled(vn.ImplicitArray):
            x: jax.Array

            def materialize(self):
                return self.x


def test_a_class_of_veneer_may_have_both_spellings():
    class Both(vn.ImplicitArray):
        x: jax.Array

        def materialise(self):
            return self.x

        materialize = materialise

    assert Both(X).shape == X.shape


def test_a_hundred_programs_agree_with_the_dense_ones():
    assert len(vn.testing.check_rules(Lora, lora()).agree) > 100


def test_high_types_take_arrays_of_the_module():
    expected = jax.grad(implicit(loss), 1)(X, lora())
    with vn.hijax.enabled():
        assert_close(jax.jit(jax.grad(loss, 1))(X, lora()).a, expected.a)


def test_arrays_are_saved_and_loaded(tmp_path):
    vn.save(tmp_path / "saved", {"w": codes()})
    loaded = vn.load(tmp_path / "saved", like={"w": codes()})["w"]
    assert type(loaded) is Codes
    assert_close(loaded.materialize(), codes().materialize())


def test_replace_jaximus_serves_imports_of_eformer(monkeypatch):
    for name in ("eformer", "eformer.jaximus"):
        monkeypatch.setitem(sys.modules, name, jaximus)  # which is restored
        del sys.modules[name]
    for _ in range(2):  # the second call changes nothing
        jaximus.replace_jaximus()
    assert importlib.import_module("eformer.jaximus") is jaximus
    names: dict = {}
    exec("import eformer.jaximus\nfrom eformer.jaximus import ImplicitArray", names)
    assert names["ImplicitArray"] is names["eformer"].jaximus.ImplicitArray is ImplicitArray


def test_replace_jaximus_is_refused_after_eformer_is_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "eformer.jaximus", ModuleType("eformer.jaximus"))
    with pytest.raises(RuntimeError, match="before the first import of eformer"):
        jaximus.replace_jaximus()
