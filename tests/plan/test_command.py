"""`veneer plan`: its output, its errors, and its output on the page about scale."""

import json
import re
import shlex
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.model_configs import CONFIGS, SMALL

import veneer as vn
from veneer import cli
from veneer.cli.plan import COMMAND, _parse_bytes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scale.md").read_text("utf-8")
SHOWN = re.findall(r"```sh\nveneer (plan [^\n]*)\n```\n+```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def veneer(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["veneer", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "120")
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return exit.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def small(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


def test_the_page_shows_three_models():
    assert len(SHOWN) == len(list(CONFIGS.glob("*.json"))) == 3


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=lambda text: text.split()[1])
def test_the_page_shows_the_printed_output(command, shown, veneer, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert veneer(*shlex.split(command)) == (0, shown, "")


def test_shardings_of_the_json_place_the_weights_of_a_checkpoint(veneer, small):
    small_enough = ("--devices", 8, "--memory", "1MB", "--format", "int8", "--length", 64, "--json")
    code, printed, stderr = veneer("plan", small, *small_enough)
    assert (code, stderr) == (0, "")
    found = json.loads(printed)
    assert (found["architecture"], found["parameters"]) == ("llama", 41_184)
    assert found.keys() == COMMAND.json_keys.keys()
    for use in (found["serving"], found["fine-tuning"]):
        named = {*use, *use["step"], *use["splits"][0], *use["splits"][0]["split"]}
        assert all(key in COMMAND.json_keys["serving"] for key in named)
    best = next(s for s in found["serving"]["splits"] if s["split"]["tensor"] == 4 and s["fits"])
    assert best["total"] == sum(best["held"].values()) <= 900_000
    sizes = {name: best["split"][name] for name in ("data", "expert", "tensor")}
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 3)
    rules = [(r, NamedSharding(mesh, P(*spec))) for r, spec in best["shardings"].items()]
    name = "model.layers.2.mlp.down_proj.weight"
    w = vn.quant.quantize(jnp.ones((32, 96)), "int8", channelwise_axes=[0])
    rules = [rule for rule in rules if re.fullmatch(rule[0], name)]
    assert vn.device_put({name: w}, rules)[name].packed.sharding.spec == P(None, "tensor")


def test_if_no_split_fits_the_smallest_is_shown(veneer, small):
    code, printed, _ = veneer("plan", small, "--devices", 2, "--memory", "10kB")
    assert code == 0
    assert "0 of 3 splits of 2 devices fit in 0.0 MB" in printed
    assert printed.count("no split fits: this one needs the least") == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"--memory": "lots"},
            "'lots' is not a number of bytes, such as 80GB or 16GiB (try 'veneer plan --help')",
        ),
        ({"--format": "int9"}, "unknown format 'int9'"),
        ({"--devices": 3}, "use a batch size that is a multiple of 3"),
        ({"--tile": 0}, "Invalid value for '--tile'"),
    ],
)
def test_bad_input_is_one_line(given, message, veneer, small):
    options = {"--devices": 2, "--memory": "1GB", "--batch": 2} | given
    code, printed, stderr = veneer("plan", small, *(w for pair in options.items() for w in pair))
    assert (code, printed) == (2, "")
    assert message in stderr
    assert stderr.count("\n") == 1


def test_an_invalid_or_missing_config_is_reported(veneer, small):
    options = "--devices", 1, "--memory", "1GB"
    (small / "config.json").write_text("{")
    assert "config.json is not valid JSON: Expecting" in veneer("plan", small, *options)[2]
    (small / "config.json").write_text("[]")
    assert "config.json is not a JSON object" in veneer("plan", small, *options)[2]
    assert "none.json does not exist: CONFIG" in veneer("plan", small / "none.json", *options)[2]


def test_memory_is_parsed_with_decimal_and_binary_units():
    assert (_parse_bytes("80GB"), _parse_bytes("1.5 GiB")) == (80e9, 1.5 * 2**30)
