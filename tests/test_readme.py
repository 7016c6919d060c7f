"""Test the programs, figures and links of the README."""

import doctest
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tables
from flax import linen, nnx
from support import arrays

import veneer as vn

README = Path(__file__).parent.parent / "README.md"
PROGRAM = re.compile(r"```python\n(.*?)```\n+```text\n(.*?)```", re.DOTALL)


def test_programs_print_the_output_of_the_readme(capsys):
    programs = PROGRAM.findall(README.read_text("utf-8"))
    assert len(programs) == 2
    names: dict = {"__name__": "readme"}
    for program, shown in programs:
        exec(compile(program, str(README), "exec"), names)
        printed = capsys.readouterr().out
        assert doctest.OutputChecker().check_output(shown, printed, doctest.NORMALIZE_WHITESPACE)
    assert jnp.linalg.norm(names["y"] - names["dense"]) < 0.012 * jnp.linalg.norm(names["dense"])


def test_results_equal_rows_of_the_demo_page():
    demo = tables.Table("docs/demo.md", "| format | bytes | of f32 |")
    readme = tables.Table("README.md", "| format | size |")
    names = ("int8, channelwise", "int8 by int8, rotated", "nf4, tile 64")
    names = ("f32", *names, "int4, tile 128, calibrated")
    columns = ("bytes", "cosine", "batch of 64", "batch of 1")
    expected = [demo.numbers(name, *columns) for name in names]
    actual = [readme.numbers(name, *readme.headings[1:]) for name in readme.rows]
    np.testing.assert_allclose(np.array(actual)[:, 0] * 1e6, np.array(expected)[:, 0], rtol=0.01)
    np.testing.assert_array_equal(np.array(actual)[:, 1:], np.array(expected)[:, 1:])


def test_the_language_model_is_as_fast_as_on_the_demo_page():
    demo = tables.Table("docs/demo.md", "| weights | bytes |")
    (shown,) = re.findall(
        r"(\d+) tokens per second in int8, and (\d+) in f32", README.read_text("utf-8")
    )
    rows = ("int8, channelwise", "f32, the same values")
    assert list(map(float, shown)) == [demo.numbers(row, "tokens per second")[0] for row in rows]


def test_the_text_is_short():
    text = re.sub("```.*?```", "", README.read_text("utf-8"), flags=re.DOTALL)
    assert len(text.split()) <= 900


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


#: The variables that a row of the table uses, and a function that runs the dense model.
MODELS = {
    "Flax nnx": lambda: module_of(Nnx),
    "Flax linen": linen_model,
    "Equinox": lambda: module_of(lambda: Equinox(eqx.nn.Linear(128, 256, key=jax.random.key(1)))),
    "plain JAX": plain_model,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_table_of_frameworks_runs(name):
    row = next(line for line in README.read_text("utf-8").split("\n") if f"| [{name}]" in line)
    has, run_dense = MODELS[name]()
    names = {"vn": vn, "jax": jax, "nnx": nnx, "eqx": eqx, "x": X, **has}
    programs = re.findall("`(.*?)`", row)
    assert len(programs) == 2
    for program in programs:
        exec(program, names)
    (weight,) = filter(_is_array, jax.tree.leaves(names["small"], is_leaf=_is_array))
    assert 8 * weight.nbytes == (8 + 32 / 128) * weight.size  # one f32 scale per column of 128
    error = jnp.linalg.norm(names["y"] - run_dense()) / jnp.linalg.norm(run_dense())
    assert 0 < error < 0.02


def _is_array(x):
    return isinstance(x, vn.quant.QArray)


def test_every_link_leads_somewhere():
    text = README.read_text("utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert links
    for link in links:
        assert (README.parent / link).exists(), link
