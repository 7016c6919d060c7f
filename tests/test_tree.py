"""`vn.tree`: functions of trees with implicit arrays as leaves."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.array_types import Diagonal, Lora, lora
from support.policies import only_by_rules

import veneer as vn

QLORA = dataclasses.replace(lora(arrays.key(0)), w=arrays.quantized("int8", 6, 6))
TREE = {"w": QLORA, "rest": [arrays.ones(2), {"d": Diagonal(arrays.arange(3.0))}, None]}
PATHS = ["rest.0", "rest.1.d", "w"]
LEAVES = [TREE["rest"][0], TREE["rest"][1]["d"], QLORA]


def is_list(x):
    return isinstance(x, list)


def same(one, other):
    return len(one) == len(other) and all(x is y for x, y in zip(one, other, strict=True))


def test_an_implicit_array_is_a_leaf():
    assert same(vn.tree.leaves(TREE), LEAVES)
    leaves, treedef = vn.tree.flatten(TREE)
    assert same(leaves, LEAVES)
    assert treedef == vn.tree.structure(TREE)
    assert treedef.num_leaves == 3
    assert vn.tree.unflatten(treedef, leaves)["w"] is QLORA


def test_leaves_have_the_paths_of_the_arrays():
    with_path = vn.tree.leaves_with_path(TREE)
    assert [vn.tree.path_string(path) for path, _ in with_path] == PATHS
    assert same([x for _, x in with_path], LEAVES)
    leaves, treedef = vn.tree.flatten_with_path(TREE)
    assert same([x for _, x in leaves], LEAVES)
    assert treedef == vn.tree.structure(TREE)


def test_map_calls_the_function_on_implicit_arrays():
    shapes = vn.tree.map(lambda x: x.shape, TREE)
    assert shapes == {"w": (6, 6), "rest": [(2,), {"d": (3, 3)}, None]}
    several = vn.tree.map(lambda x, n, y: (x is y, n), TREE, shapes, TREE, is_leaf=None)
    assert several["w"] == (True, (6, 6))
    paths = vn.tree.map_with_path(lambda path, x, n: (vn.tree.path_string(path), n), TREE, shapes)
    assert paths["rest"][1]["d"] == ("rest.1.d", (3, 3))


FUNCTIONS = {
    "leaves": vn.tree.leaves,
    "flatten": lambda tree, **options: vn.tree.flatten(tree, **options)[0],
    "structure": lambda tree, **options: [0] * vn.tree.structure(tree, **options).num_leaves,
    "map": lambda tree, **options: jax.tree.leaves(vn.tree.map(lambda _: 0, tree, **options)),
    "leaves_with_path": vn.tree.leaves_with_path,
    "flatten_with_path": lambda tree, **options: vn.tree.flatten_with_path(tree, **options)[0],
    "map_with_path": lambda tree, **options: jax.tree.leaves(
        vn.tree.map_with_path(lambda path, _: 0, tree, **options)
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_is_leaf_adds_leaves(name):
    assert len(FUNCTIONS[name](TREE)) == 3
    assert len(FUNCTIONS[name](TREE, is_leaf=is_list)) == 2


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.endswith("path")])
def test_is_leaf_can_take_the_path(name):
    options = {"is_leaf_takes_path": True}
    assert len(FUNCTIONS[name](TREE, **options)) == 3
    at_rest = lambda path, x: vn.tree.path_string(path) == "rest"
    assert len(FUNCTIONS[name](TREE, is_leaf=at_rest, **options)) == 2


def test_flatten_one_layer_flattens_one_layer():
    leaves, treedef = vn.tree.flatten_one_layer(TREE)
    d = TREE["rest"][1]["d"].diagonal
    assert same(leaves, [TREE["rest"][0], d, QLORA.w, QLORA.a, QLORA.b])
    assert vn.tree.unflatten(treedef, leaves)["w"].w is QLORA.w
    again, _ = vn.tree.flatten_one_layer(leaves)
    assert same(again, [*leaves[:2], QLORA.w.packed, QLORA.w.scale, *leaves[3:]])


def test_flatten_one_layer_keeps_an_array_that_is_also_inner():
    leaves, treedef = vn.tree.flatten_one_layer([QLORA.w, QLORA])
    assert same(leaves, [QLORA.w.packed, QLORA.w.scale, QLORA.w, QLORA.a, QLORA.b])
    assert vn.tree.unflatten(treedef, leaves)[1].w is QLORA.w


def test_depth_counts_nested_implicit_arrays():
    dense, quantized = jnp.ones((6, 6)), QLORA.w
    trees = [{}, dense, [dense, quantized], TREE, Lora(QLORA, QLORA.a, QLORA.b)]
    assert [vn.tree.depth(tree) for tree in trees] == [0, 0, 1, 2, 3]


def test_materialise_nested_removes_one_layer_or_all():
    tree = {"frozen": vn.freeze(QLORA), "w": QLORA, "n": 3}
    once = vn.tree.materialise_nested(tree)
    assert type(once["frozen"]) is Lora
    assert isinstance(once["w"], jax.Array)
    assert once["n"] == 3
    wholly = vn.tree.materialise_nested(tree, full=True)
    assert (wholly["frozen"] == vn.materialise(QLORA)).all()


def test_materialise_nested_reports_no_event():
    run = lambda x: x @ vn.tree.materialise_nested(QLORA)
    strict = vn.implicit(run, on_materialise=only_by_rules)
    assert strict(jnp.ones(6)).shape == (6,)


MASKS = {
    "tree": {"w": Lora(False, True, True), "rest": [True, {"d": Diagonal(False)}, None]},
    "prefix": {"w": Lora(False, True, True), "rest": [True, False, None]},
    "predicate": lambda x: jnp.shape(x) in {(6, 2), (2, 6), (2,)},
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_partition_divides_the_leaves_of_implicit_arrays(mask):
    tree = {**TREE, "w": Lora(jnp.ones((6, 6)), QLORA.a, QLORA.b)}
    chosen, rest = vn.tree.partition(tree, mask)
    assert same(jax.tree.leaves(chosen), [TREE["rest"][0], QLORA.a, QLORA.b])
    assert chosen["w"].w is None
    assert type(rest["w"]) is Lora
    assert same(jax.tree.leaves(rest), [TREE["rest"][1]["d"].diagonal, tree["w"].w])
    whole = vn.tree.combine(chosen, rest)
    assert jax.tree.structure(whole) == jax.tree.structure(tree)
    assert same(jax.tree.leaves(whole), jax.tree.leaves(tree))


def test_a_callable_module_can_be_a_mask():
    class Linear(eqx.Module):
        w: jax.Array
        b: jax.Array

        def __call__(self, x):
            return x @ self.w + self.b

    layer = Linear(QLORA.w, jnp.ones(6))
    trained, rest = vn.tree.partition(layer, vn.trainable(layer))
    assert same(jax.tree.leaves(trained), [layer.b])
    x = jnp.ones((2, 6))
    assert (vn.tree.combine(trained, rest)(x) == layer(x)).all()


def test_a_partition_has_a_repr():
    assert "QArray(packed=None" in repr(vn.tree.partition(QLORA, False)[0])


def test_a_loss_can_be_differentiated_by_one_partition():
    mask = Lora(False, True, False, scale=QLORA.scale)
    chosen, rest = vn.tree.partition(QLORA, mask)
    loss = lambda chosen, x: jnp.sin(x @ vn.tree.combine(chosen, rest)).sum()
    gradient = jax.jit(jax.grad(loss))(chosen, jnp.ones((2, 6)))
    by_hand = lambda a, x: jnp.sin(x @ Lora(QLORA.w, a, QLORA.b, scale=QLORA.scale)).sum()
    (found,) = jax.tree.leaves(gradient)
    assert jnp.allclose(found, jax.grad(by_hand)(QLORA.a, jnp.ones((2, 6))))


def test_combine_takes_the_first_present_value():
    trees = [[None, 1, None, None], [2, 2, None, None], [3, 3, 3, None]]
    assert vn.tree.combine(*trees) == [2, 1, 3, None]


@pytest.mark.parametrize(
    ("mask", "error", "says"),
    [
        ({"w": True}, ValueError, "The mask is not a prefix of the tree"),
        ({"w": 1, "rest": True}, TypeError, "A mask must have bools as leaves, not 1"),
        ({"w": np.array(True), "rest": True}, TypeError, "A mask must have bools"),
    ],
    ids=["structure", "number", "array"],
)
def test_a_mask_that_does_not_fit_raises(mask, error, says):
    with pytest.raises(error, match=says):
        vn.tree.partition(TREE, mask)
