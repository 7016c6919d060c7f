"""`vn.trainable`, `vn.freeze` and `vn.unfreeze`: which arrays of a model are trained."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.array_types import assert_close, lora

import veneer as vn
from veneer.types.frozen import Frozen


class Adapted(vn.ImplicitArray):
    """A frozen weight with a trained low-rank update."""

    w: jax.Array | vn.ImplicitArray  # [..., in, out]
    a: jax.Array  # [..., in, rank]
    b: jax.Array  # [..., rank, out]
    trainable = ("a", "b")

    def materialise(self):
        return vn.materialise(self.w) + self.a @ self.b


A, B = arrays.ones((4, 1)), arrays.ones((1, 4))
INT8 = arrays.quantized("int8", 4, 4)


def model():
    return {
        "dense": Adapted(jnp.eye(4), A, B),
        "quantized": Adapted(INT8, A, B),
        "frozen base": Adapted(vn.freeze(jnp.eye(4)), A, B),
        "plain": lora(jax.random.key(1), (4, 4)),
        "weight": INT8,
        "bias": jnp.zeros(4),
        "half": jnp.zeros(4, jnp.bfloat16),
        "steps": jnp.arange(3),
        "key": jax.random.key(0),
        "numpy": np.zeros(3, np.float32),
        "activation": jnp.tanh,
        "rate": 0.1,
        "nothing": None,
    }


def trained_paths(mask):
    leaves = jax.tree.leaves_with_path(mask)
    return {vn.tree.path_string(path) for path, trained in leaves if trained}


ADAPTERS = {f"{name}.{x}" for name in ("dense", "quantized", "frozen base") for x in "ab"}
DENSE = {"bias", "half", "numpy"}
PLAIN = {"plain.w", "plain.a", "plain.b"}


def test_trainable_selects_floating_arrays():
    mask = vn.trainable(model())
    assert trained_paths(mask) == ADAPTERS | DENSE | PLAIN
    assert jax.tree.structure(mask) == jax.tree.structure(model())
    assert {type(x) for x in jax.tree.leaves(mask)} == {bool}


@pytest.mark.parametrize(
    ("where", "paths"),
    [
        ("bias|half", {"bias", "half"}),
        ("quantized", {"quantized.a", "quantized.b"}),
        (r".*\bba.*|weight|steps", {"frozen base.a", "frozen base.b"}),
        (lambda path, x: isinstance(x, Adapted), ADAPTERS),
        (Adapted, ADAPTERS),
        (lambda path, x: getattr(x, "dtype", None) == jnp.bfloat16, {"half"}),
        (lambda path, x: path == "plain", PLAIN),
        (lambda path, x: False, set()),
    ],
    ids=["paths", "an implicit array", "excluded anyway", "type", "class", "dtype", "path", "none"],
)
def test_trainable_selects_by_where(where, paths):
    assert trained_paths(vn.trainable(model(), where)) == paths


def test_trainable_takes_an_abstract_model():
    arrays = {name: model()[name] for name in ("dense", "quantized", "bias", "steps")}
    abstract = jax.eval_shape(lambda: arrays)
    assert trained_paths(vn.trainable(abstract)) == trained_paths(vn.trainable(arrays))


def test_a_trainable_field_can_be_a_tree():
    class Layered(vn.ImplicitArray):
        fixed: dict
        moving: dict
        trainable = ("moving",)

        def materialise(self):
            return self.fixed["x"] + self.moving["x"]

    mask = vn.trainable(Layered({"x": jnp.ones(2)}, {"x": jnp.ones(2), "y": INT8}))
    assert trained_paths(mask) == {"moving.x"}


@pytest.mark.parametrize("names", [("a", "c"), "a"])
def test_trainable_must_name_fields_of_the_type(names):
    class Wrong(vn.ImplicitArray):
        a: jax.Array
        trainable = names

        def materialise(self):
            return self.a

    with pytest.raises(TypeError, match=r"Wrong\.trainable must be .* names of fields, .* a, not"):
        vn.trainable(Wrong(jnp.ones(2)))


def test_freeze_wraps_floating_arrays():
    frozen = vn.freeze(model())
    kept = {name for name, x in frozen.items() if not isinstance(x, Frozen)}
    assert kept == {"steps", "key", "activation", "rate", "nothing"}
    assert trained_paths(vn.trainable(frozen)) == set()


def test_freeze_selects_by_where():
    frozen = vn.freeze(model(), lambda path, x: not isinstance(x, Adapted))
    assert trained_paths(vn.trainable(frozen)) == ADAPTERS
    frozen = vn.freeze(model(), "quantized|bias")
    assert {k for k, x in frozen.items() if isinstance(x, Frozen)} == {"quantized", "bias"}


def test_freezing_twice_equals_freezing_once():
    once = vn.freeze(model())
    assert jax.tree.structure(vn.freeze(once)) == jax.tree.structure(once)


def test_unfreeze_restores_the_tree():
    params = {k: v for k, v in model().items() if k != "frozen base"}
    thawed = vn.unfreeze(vn.freeze(params))
    assert jax.tree.structure(thawed) == jax.tree.structure(params)
    pairs = zip(jax.tree.leaves(thawed), jax.tree.leaves(params), strict=True)
    assert all(x is y for x, y in pairs)


def test_unfreeze_reaches_nested_frozen_arrays():
    within = Adapted(vn.freeze(vn.freeze(INT8)), A, B)
    assert vn.unfreeze({"w": within})["w"].w.packed is INT8.packed


def test_unfreeze_selects_by_where():
    frozen = vn.freeze({"layers": [jnp.ones(2), jnp.ones(2)], "out": jnp.ones(2)})
    thawed = vn.unfreeze(frozen, r"layers\.1|out")
    assert trained_paths(vn.trainable(thawed)) == {"layers.1", "out"}


@pytest.mark.parametrize("function", [vn.trainable, vn.freeze, vn.unfreeze])
def test_an_invalid_or_unmatched_regex_is_reported(function):
    with pytest.warns(UserWarning, match=re.escape("'a.*' matches no array")):
        function({"bias": jnp.ones(2)}, where="a.*")
    with pytest.raises(ValueError, match=r"where='\(' is not a regex"):
        function({"bias": jnp.ones(2)}, where="(")


def test_training_a_lora_changes_only_its_parameters():
    params = {"kernel": Adapted(INT8, A, 0 * B), "bias": jnp.zeros(4)}
    x, y = jnp.eye(4), jnp.ones((4, 4))
    mask = vn.trainable(params, where=lambda path, x: isinstance(x, Adapted))
    trained, rest = vn.tree.partition(params, mask)

    def loss(trained):
        params = vn.tree.combine(trained, rest)
        return ((x @ params["kernel"] + params["bias"] - y) ** 2).mean()

    @jax.jit
    def step(trained):
        value, gradient = jax.value_and_grad(loss)(trained)
        return jax.tree.map(lambda p, g: p - 0.1 * g, trained, gradient), value

    first = step(trained)[1]
    for _ in range(5):
        trained, value = step(trained)
    assert value < first
    params = vn.tree.combine(trained, rest)
    assert params["kernel"].w.packed is INT8.packed
    assert_close(params["bias"], jnp.zeros(4))
