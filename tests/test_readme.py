"""The README's programs run as they stand, one after the other."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp

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


def test_nothing_is_left_open_and_every_link_leads_somewhere():
    text = README.read_text("utf-8")
    assert "@@" not in text
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert links
    for link in links:
        assert (README.parent / link).exists(), link
