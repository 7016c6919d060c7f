"""The README's programs run as they stand, one after the other."""

import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from support import arrays

import veneer as vn

README = Path(__file__).parent.parent / "README.md"


def test_the_programs_run(capsys):
    programs = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    assert len(programs) == 6
    names: dict = {"__name__": "readme"}
    for program in programs:
        exec(compile(program, str(README), "exec"), names)

    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    assert size(names["params"]) / size(names["small"]) > 7
    dense = names["model"](vn.materialise(names["small"]), names["x"])
    assert jnp.allclose(names["y"], dense, rtol=1e-3, atol=1e-3)
    assert names["w8a8"]["up"]["kernel"].qtype == names["qat"]["up"]["kernel"].qtype == "int8"
    assert names["grads"]["up"]["kernel"].a.shape == (512, 4)
    assert names["dense"]["up"]["kernel"].shape == (512, 1024)
    assert names["u"].shape == (1000,)
    at, force = names["at"], names["force"](names["w"], names["at"])
    assert jnp.allclose(force, 2 * jnp.tanh(at) / jnp.cosh(at) ** 2, rtol=1e-5)
    assert "dot_general" in capsys.readouterr().out


X = arrays.normal(8, 128)


class Nnx(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(128, 256, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jnp.tanh(self.up(x))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return jnp.tanh(linen.Dense(256)(x))


class Equinox(eqx.Module):
    up: eqx.nn.Linear

    def __call__(self, x):
        return jnp.tanh(jax.vmap(self.up)(x))


def linen_model():
    module = Linen()
    variables = module.init(jax.random.key(1), X)
    return {"module": module, "variables": variables}, lambda: module.apply(variables, X)


def plain_model():
    model = lambda params, x: jnp.tanh(x @ params["up"])
    params = {"up": jax.random.normal(jax.random.key(1), (128, 256)) / 128**0.5}
    return {"model": model, "params": params}, lambda: model(params, X)


def module_of(make):
    module = make()
    return {"module": module}, lambda: module(X)


#: What a reader has before a row of the table, and what the dense model gives.
MODELS = {
    "Flax nnx": lambda: module_of(Nnx),
    "Flax linen": linen_model,
    "Equinox": lambda: module_of(lambda: Equinox(eqx.nn.Linear(128, 256, key=jax.random.key(1)))),
    "plain JAX": plain_model,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_each_framework_is_quantised_as_the_table_says(name):
    row = next(line for line in README.read_text("utf-8").split("\n") if f"| [{name}]" in line)
    has, run_dense = MODELS[name]()
    names = {"vn": vn, "jax": jax, "nnx": nnx, "eqx": eqx, "x": X, **has}
    programs = re.findall("`(.*?)`", row)
    assert len(programs) == 2
    for program in programs:
        exec(program, names)
    (weight,) = filter(_is_array, jax.tree.leaves(names["small"], is_leaf=_is_array))
    assert 8 * weight.nbytes == 4.5 * weight.size
    error = jnp.linalg.norm(names["y"] - run_dense()) / jnp.linalg.norm(run_dense())
    assert 0 < error < 0.12


def _is_array(x):
    return isinstance(x, vn.quant.QArray)


def test_nothing_is_left_open_and_every_link_leads_somewhere():
    text = README.read_text("utf-8")
    assert "@@" not in text
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert links
    for link in links:
        assert (README.parent / link).exists(), link
