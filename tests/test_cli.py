"""The command line: its output, the files that it writes, and its errors."""

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tables
import typer
from safetensors.numpy import save_file
from support import quantized_folders
from support.gguf_files import blocks_of
from support.model_configs import SMALL
from support.optional import needs

import veneer as vn
from veneer import cli
from veneer.cli.program import COMMANDS, EXAMPLES
from veneer.cli.quantize import FORMAT_COSTS, MORE_FORMATS
from veneer.files.folder import FolderWriter
from veneer.files.gguf import write_gguf
from veneer.quant.models.uses import default_tile


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


MODEL = {
    "embed.weight": normal(10, 8),
    "layers.0.proj.weight": normal(4, 8, seed=1),
    "layers.0.proj.bias": normal(4, seed=2),
    "layers.0.kernel": normal(8, 3, seed=3),
    "layers.1.proj.weight": normal(4, 8, seed=4).astype(ml_dtypes.bfloat16),
    "norm.weight": normal(8, seed=5),
    "position_ids": np.arange(10).reshape(1, 10),
    "table": normal(6, 8, seed=6),
}

TABLE_IS_DENSE = (
    "veneer: warning: 1 matrix stays dense, because its name does not end in 'weight' or "
    "'kernel': table. Use --include REGEX (and --layout jax or torch)\n"
)

QUANTIZED = ["embed.weight", "layers.0.kernel", "layers.0.proj.weight", "layers.1.proj.weight"]


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    (folder / "1_Pooling").mkdir(parents=True)
    save_file(MODEL, folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "vocab.txt", "1_Pooling/config.json"):
        (folder / name).write_text(name)
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    return folder


@pytest.fixture
def veneer(monkeypatch, capsys):
    """Return a function that runs `veneer ...` and returns the exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["veneer", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return exit.value.code, *capsys.readouterr()

    return run


def formats(folder):
    """Return the format and tile shape of each quantized tensor in a folder."""
    tree = vn.load(folder)
    return {
        name: (value.qtype, tuple(np.array(value.shape) // value.scale.shape))
        for name, value in tree.items()
        if isinstance(value, vn.quant.QArray)
    }


def test_quantize_writes_a_model_folder_that_loads(veneer, model, tmp_path):
    out = tmp_path / "out"
    code, _, stderr = veneer("quantize", model, out, "--format", "nf4", "--tile", 4)
    assert (code, stderr) == (0, TABLE_IS_DENSE)
    loaded = vn.load(out)
    assert list(loaded) == sorted(MODEL)
    assert formats(out) == {
        name: ("nf4", (4, 1) if "kernel" in name else (1, 4)) for name in QUANTIZED
    }
    for name, original in MODEL.items():
        if name in QUANTIZED:
            rule = vn.quant.Rule(".*", "nf4", tile_size=4, tile_axis=-2 if "kernel" in name else -1)
            expected = vn.quant.quantize_tree(jnp.asarray(original), [rule])
            assert jax.tree.structure(loaded[name]) == jax.tree.structure(expected)
            assert jax.tree.all(jax.tree.map(jnp.array_equal, loaded[name], expected))
        else:
            assert loaded[name].dtype == original.dtype
            np.testing.assert_array_equal(loaded[name], original)


def test_quantize_copies_configs_and_tokenizers(veneer, model, tmp_path):
    veneer("quantize", model, tmp_path / "out", "--format", "int8")
    files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*")}
    assert files == {
        "model.safetensors",
        "veneer.json",
        "config.json",
        "tokenizer.json",
        "vocab.txt",
        "1_Pooling/config.json",
    }
    assert (tmp_path / "out" / "1_Pooling" / "config.json").read_text() == "1_Pooling/config.json"


def test_quantize_prints_a_row_for_each_group(veneer, model, tmp_path):
    _, stdout, _ = veneer("quantize", model, tmp_path / "out", "--format", "int8")
    rows = {cells[0]: cells[1:] for line in stdout.splitlines() if (cells := line.split())}
    # 4 rows of 8 codes with a float32 scale each, and of 8 codes with a bfloat16 scale each
    count, *format, before, _, after, _, error = rows["layers.*.proj.weight"]
    assert (count, format, before, after) == ("2", ["int8,", "channelwise"], "192", "88")
    assert 0 < float(error) < 0.02
    assert rows["embed.weight"][0] == "1"
    assert rows["norm.weight"][:4] == ["1", "float32", "32", "bytes"]
    before = sum(x.nbytes for x in MODEL.values())
    after = sum(x.nbytes for x in vn.load(tmp_path / "out").values())
    # position_ids are int64 in both
    assert rows["total"][:2] == ["8", f"{before / after:.2f}"]


@pytest.mark.parametrize("columns", ["20", "60", "200"])
def test_no_name_and_no_number_is_cut_in_a_narrow_terminal(
    veneer, model, tmp_path, monkeypatch, columns
):
    monkeypatch.setenv("COLUMNS", columns)
    _, stdout, _ = veneer("quantize", model, tmp_path / "out", "--format", "int8")
    assert "layers.*.proj.weight" in stdout
    assert "relative error" in stdout
    _, stdout, _ = veneer("inspect", tmp_path / "out", "--against", model)
    assert "layers.0.proj.weight" in stdout
    assert "…" not in stdout


def test_quantize_warns_of_weights_that_are_not_finite(veneer, tmp_path):
    weights = {"good.weight": normal(4, 8), "bad.weight": normal(4, 8)}
    weights["bad.weight"][1, 2] = np.nan
    save_file(weights, tmp_path / "model.safetensors")
    result = veneer("quantize", tmp_path / "model.safetensors", tmp_path / "out", *INT8)
    assert (result[0], result[2]) == (0, "veneer: warning: NaN or infinity in bad.weight\n")


def test_quantize_reads_a_single_file(veneer, model, tmp_path):
    veneer("quantize", model / "model.safetensors", tmp_path / "out", "--format", "int8")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model.safetensors",
        "veneer.json",
    ]


def test_quantize_reads_shards(veneer, tmp_path):
    folder = tmp_path / "sharded"
    folder.mkdir()
    weight_map = {name: f"model-{i}.safetensors" for i, name in enumerate(MODEL)}
    for name, file in weight_map.items():
        save_file({name: MODEL[name]}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert veneer("quantize", folder, tmp_path / "out", "--format", "int4")[0] == 0
    assert sorted(formats(tmp_path / "out")) == QUANTIZED
    assert not (tmp_path / "out" / index.name).exists()


def test_quantize_keeps_the_tree_of_a_saved_model(veneer, tmp_path):
    vn.save(tmp_path / "saved", {"layers": [{"kernel": normal(8, 4), "bias": normal(4)}]})
    assert veneer("quantize", tmp_path / "saved", tmp_path / "out", "--format", "int8")[0] == 0
    loaded = vn.load(tmp_path / "out")
    assert loaded["layers"][0]["kernel"].qtype == "int8"
    np.testing.assert_array_equal(loaded["layers"][0]["bias"], normal(4))


CHOICES = {
    "include": (["--include", "embed.*"], {"embed.weight": (1, 8)}),
    "include_twice": (
        ["--include", "embed.*", "--include", ".*proj.*"],
        {"embed.weight": (1, 8), "layers.0.proj.weight": (1, 8), "layers.1.proj.weight": (1, 8)},
    ),
    "exclude": (["--exclude", ".*layers.*"], {"embed.weight": (1, 8)}),
    "exclude_table": (["--exclude", "table|layers.*"], {"embed.weight": (1, 8)}),
    "both": (["--include", ".*proj.*", "--exclude", ".*0.*"], {"layers.1.proj.weight": (1, 8)}),
    "layout": (["--include", "table", "--layout", "jax"], {"table": (6, 1)}),
    "layout_over_name": (["--include", "embed.*", "--layout", "jax"], {"embed.weight": (10, 1)}),
}


@pytest.mark.parametrize(("options", "expected"), CHOICES.values(), ids=CHOICES)
def test_options_select_the_tensors(veneer, model, tmp_path, options, expected):
    code, _, stderr = veneer("quantize", model, tmp_path / "out", "--format", "int8", *options)
    chosen = "--include" in options or any("table" in option for option in options)
    assert (code, stderr) == (0, "" if chosen else TABLE_IS_DENSE)
    assert formats(tmp_path / "out") == {k: ("int8", v) for k, v in expected.items()}


def test_rules_select_the_tensors(veneer, model, tmp_path):
    rules = [
        {"path": "embed.*", "qtype": None},
        {"path": "table", "qtype": "nf4", "tile_size": 2, "tile_axis": -2},
        {"path": ".*weight", "qtype": "int8", "tile_size": 4},
    ]
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    code, _, stderr = veneer(
        "quantize", model, tmp_path / "out", "--rules", tmp_path / "rules.json"
    )
    assert (code, stderr) == (0, "")
    assert formats(tmp_path / "out") == {
        "table": ("nf4", (2, 1)),
        "layers.0.proj.weight": ("int8", (1, 4)),
        "layers.1.proj.weight": ("int8", (1, 4)),
    }


@pytest.mark.parametrize(
    ("format", "qtype", "tile"),
    [
        ("mxfp4", "mxfp4", 32),
        ("nvfp4", "nvfp4", 16),
        ("int3", "int3", 32),
        ("ternary", "ternary", 32),
        ("nf4", "nf4", 64),
        ("int5", "int5", 64),
        ("fp8", "float8_e4m3fn", None),
        ("int8", "int8", None),
        ("nf4_dq", "nf4_dq", 64),
    ],
)
def test_a_format_uses_its_default_tile(veneer, tmp_path, format, qtype, tile):
    save_file({"a.weight": normal(4, 128)}, tmp_path / "model.safetensors")
    code, stdout, stderr = veneer(
        *("quantize", tmp_path / "model.safetensors", tmp_path / "out", "--format", format)
    )
    assert (code, stderr) == (0, "")
    assert qtype in stdout
    assert formats(tmp_path / "out") == {"a.weight": (qtype, (1, tile or 128))}
    code, stdout, _ = veneer(
        *("inspect", tmp_path / "out", "--against", tmp_path / "model.safetensors")
    )
    assert code == 0
    assert qtype in stdout


def test_a_tile_of_channel_is_one_scale_per_channel(veneer, tmp_path):
    weights = {"a.weight": normal(4, 128), "b.kernel": normal(128, 4)}
    save_file(weights, tmp_path / "model.safetensors")
    options = ("--format", "int4", "--tile", "channel")
    code, stdout, stderr = veneer(
        "quantize", tmp_path / "model.safetensors", tmp_path / "out", *options
    )
    assert (code, stderr) == (0, "")
    assert "int4, channelwise" in stdout
    assert formats(tmp_path / "out") == {
        "a.weight": ("int4", (1, 128)),
        "b.kernel": ("int4", (128, 1)),
    }


@pytest.mark.parametrize("format", ["nf4", "mxfp4", "int2"])
def test_default_tiles_equal_the_tiles_of_quantize_tree(veneer, tmp_path, format):
    widths = (64, 96, 80, 40, 67)
    weights = {f"w{k}.kernel": normal(k, 128) for k in widths}
    save_file(weights, tmp_path / "model.safetensors")
    arguments = (tmp_path / "model.safetensors", tmp_path / "out", "--format", format)
    code, _, stderr = veneer("quantize", *arguments)

    def model(params, xs):
        return [x @ params[f"w{x.shape[-1]}.kernel"] for x in xs]

    with pytest.warns(UserWarning, match="does not divide the contracted axes: w"):
        expected = vn.quant.quantize_tree(
            {name: jnp.asarray(w) for name, w in weights.items()},
            format,
            model=model,
            args=([jnp.ones((1, k)) for k in widths],),
        )
    stored = vn.load(tmp_path / "out")
    for name, q in expected.items():
        if isinstance(q, vn.quant.QArray):
            assert (stored[name].qtype, stored[name].tile_shape) == (q.qtype, q.tile_shape)
    assert sum(isinstance(q, vn.quant.QArray) for q in expected.values()) >= 4
    assert code == 0
    assert stderr.startswith(f"veneer: warning: the default tile of {format} does not divide")
    assert "w96.kernel [96, 128] has tiles of 48, not 64" in stderr or format != "nf4"


def test_a_rule_in_a_file_without_tile_size_is_per_channel(veneer, tmp_path):
    save_file({"a.weight": normal(4, 128)}, tmp_path / "model.safetensors")
    (tmp_path / "rules.json").write_text('[{"path": ".*", "qtype": "nf4"}]')
    arguments = (tmp_path / "model.safetensors", tmp_path / "out", "--rules")
    assert veneer("quantize", *arguments, tmp_path / "rules.json")[0] == 0
    assert formats(tmp_path / "out") == {"a.weight": ("nf4", (1, 128))}


INT8 = ["--format", "int8"]


@pytest.fixture
def flat(tmp_path):
    """Return a file in which most matrices have unusual names."""
    layers = {f"layers.{i}.{name}": normal(8, 8) for i in range(4) for name in ("up", "down")}
    save_file(layers | {"embed.weight": normal(8, 8)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_matrices_that_stay_dense_by_their_names_are_listed(veneer, flat, tmp_path):
    code, stdout, stderr = veneer("quantize", flat, tmp_path / "out", *INT8, "--json")
    assert (code, stderr) == (
        0,
        "veneer: warning: 8 matrices stay dense, because their names do not end in 'weight' or "
        "'kernel': layers.0.down, layers.0.up, layers.1.down, layers.1.up, ... Use --include REGEX "
        "(and --layout jax or torch)\n",
    )
    left = json.loads(stdout)["left_dense"]
    assert left == [f"layers.{i}.{name}" for i in range(4) for name in ("down", "up")]
    options = (*INT8, "--include", "layers.*", "--layout", "jax", "--json")
    code, stdout, stderr = veneer("quantize", flat, tmp_path / "other", *options)
    assert (code, stderr, json.loads(stdout)["left_dense"]) == (0, "", [])
    assert len(formats(tmp_path / "other")) == 8


def test_quantizing_nothing_is_an_error(veneer, flat, tmp_path):
    result = veneer("quantize", flat, tmp_path / "out", *INT8, "--exclude", "embed.*")
    assert_bad_input(result, "no tensor is left to quantize")
    save_file({"layers.0.up": normal(8, 8)}, flat)
    result = veneer("quantize", flat, tmp_path / "out", *INT8)
    assert_bad_input(result, "nothing is quantized: 1 matrix stays dense, because its name does")
    vn.save(tmp_path / "saved", {"a.weight": vn.quant.quantize(normal(4, 8), "int8")})
    result = veneer("quantize", tmp_path / "saved", tmp_path / "out", *INT8)
    assert_bad_input(result, "saved has no dense tensors: all are already quantized")
    (tmp_path / "rules.json").write_text('[{"path": "nothing", "qtype": "int8"}]')
    result = veneer("quantize", flat, tmp_path / "out", "--rules", tmp_path / "rules.json")
    assert_bad_input(result, "the rule 'nothing' matches no tensor")
    assert not (tmp_path / "out").exists()


BAD_OPTIONS = {
    "format_missing": (
        [],
        "give --format FORMAT, e.g. --format int8, --for LIBRARY or --rules FILE "
        "(try 'veneer quantize --help')",
    ),
    "format_unknown": (
        ["--format", "int9"],
        "did you mean 'int8'? 'veneer quantize --help' lists the formats",
    ),
    "format_gguf": (["--format", "q4_0"], "use 'int4' with --tile 32"),
    "tile": (
        ["--format", "int8", "--tile", "3"],
        "tile 3 does not divide axis -1 of 'embed.weight' [10, 8]. Tiles that do are 1, 2, 4, 8",
    ),
    "tile_exclude": (["--format", "int8", "--tile", "3"], r"--exclude 'embed\.weight'"),
    "layout_hint": ([*INT8, "--include", "table"], "or give --layout torch (the last axis)"),
    "tile_other": (
        ["--format", "mxfp4", "--tile", "16"],
        "mxfp4 needs tiles of 32, not 16: leave out --tile",
    ),
    "tile_zero": (["--format", "int8", "--tile", "0"], "--tile must be at least 1, not 0"),
    "include_regex": ([*INT8, "--include", "("], "--include or --exclude '(' is not a regex"),
    "format_dense": (["--format", "bf16"], "a dense dtype: --exclude keeps tensors dense"),
    "tile_own": (
        ["--format", "mxfp4", "--tile", "32"],
        "tile 32 does not divide axis -1 of 'embed.weight' [10, 8]. mxfp4 has no other",
    ),
    "tile_text": ([*INT8, "--tile", "many"], "--tile must be a number or 'channel', not 'many'"),
    "tile_fixed": (["--format", "mxfp4", "--tile", "channel"], "mxfp4 needs tiles of 32"),
    "include": ([*INT8, "--include", "attention"], "--include 'attention' matches no tensor"),
    "include_part": ([*INT8, "--include", "embed"], "--include 'embed' matches no tensor"),
    "exclude": ([*INT8, "--exclude", "attention"], "--exclude 'attention' matches no tensor"),
    "regex": ([*INT8, "--include", "("], "'(' is not a regex"),
    "dtype": ([*INT8, "--include", "pos.*"], "'position_ids' is int64[1, 10]"),
    "layout_unknown": ([*INT8, "--include", "table"], "contracted axis of 'table' [6, 8]"),
    "layout_other": ([*INT8, "--layout", "keras"], "keras"),
    "rules_missing": (["--rules", "nowhere.json"], "nowhere.json"),
    "rules_and_format": (["--rules", "r", *INT8], "--format cannot be combined with --rules"),
    "rules_and_tile": (["--rules", "r", "--tile", "4"], "--tile cannot be combined with --rules"),
    "option": (["--fromat", "int8"], "(try 'veneer quantize --help')"),
    "method": ([*INT8, "--method", "gptq"], "--method needs activations: give a text with"),
}


def assert_bad_input(result, message):
    code, stdout, stderr = result
    assert (code, stdout) == (2, "")
    assert re.fullmatch(r"veneer: error: .+\n", stderr)  # one line: a dot is not a newline
    assert message in stderr


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options_get_one_line_and_leave_nothing(veneer, model, tmp_path, options, message):
    before = contents(tmp_path)
    assert_bad_input(veneer("quantize", model, tmp_path / "out", *options), message)
    assert contents(tmp_path) == before


def truncate(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1])


BAD_INPUTS = {
    "truncated": (truncate, "is truncated"),
    "alien": (
        lambda f: (f / "model.safetensors").write_bytes(b"PK" * 99),
        "not a safetensors file",
    ),
    "pickled": (lambda f: (f / "model.safetensors").unlink(), "convert it to safetensors first"),
    "several": (lambda f: save_file(MODEL, f / "other.safetensors"), "other.safetensors"),
    "out_exists": (lambda f: (f.parent / "out").mkdir(), "already exists"),
    "out_is_a_file": (lambda f: (f.parent / "out").write_text("mine"), "already exists"),
    "bad_index": (lambda f: (f / "model.safetensors.index.json").write_text("{"), "not JSON"),
    "deep_index": (
        lambda f: (f / "model.safetensors.index.json").write_text("[" * 9999 + "]" * 9999),
        "nest too deeply",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_bad_input_gets_one_line_and_leaves_nothing(veneer, model, tmp_path, spoil, message):
    spoil(model)
    before = contents(tmp_path)
    assert_bad_input(veneer("quantize", model, tmp_path / "out", *INT8), message)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"])
def test_a_pickled_file_is_rejected_unopened(veneer, tmp_path, name):
    (tmp_path / name).write_bytes(b"cos\nsystem\n")
    message = "is a pickled checkpoint: convert it to safetensors first"
    assert_bad_input(veneer("quantize", tmp_path / name, tmp_path / "out", *INT8), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantize"], "(try 'veneer quantize --help')"),
        (
            ["quantise"],
            "unknown command 'quantise'; did you mean 'quantize'? (try 'veneer --help')",
        ),
        (["frobnicate"], "unknown command 'frobnicate'; commands: quantize, inspect, convert"),
        (["--frobnicate"], "(try 'veneer --help')"),
        (["plan", "model", "--devices", "0"], "(try 'veneer plan --help')"),
        (["inspect", "nowhere"], "nowhere"),
    ],
)
def test_bad_commands_get_one_line(veneer, arguments, message):
    assert_bad_input(veneer(*arguments), message)


def test_a_rules_file_that_is_wrong_is_named(veneer, model, tmp_path):
    (tmp_path / "rules.json").write_text('[{"path": ".*", "format": "int8"}]')
    result = veneer("quantize", model, tmp_path / "out", "--rules", tmp_path / "rules.json")
    assert_bad_input(result, "rules.json: a rule must be an object with 'path', 'qtype'")
    (tmp_path / "rules.json").write_text("[" * 200_000 + "]" * 200_000)
    result = veneer("quantize", model, tmp_path / "out", "--rules", tmp_path / "rules.json")
    assert_bad_input(result, "rules.json: the rules are not JSON")


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["ctrl-c", "kill", "lost terminal"],
)
def test_an_interrupted_run_leaves_nothing(veneer, model, tmp_path, monkeypatch, number, code):
    monkeypatch.setattr(FolderWriter, "finish", lambda *_: signal.raise_signal(number))
    before = contents(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    as_tests_began = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores
    try:
        assert veneer("quantize", model, tmp_path / "out", *INT8)[0] == code
    finally:
        signal.signal(signal.SIGINT, as_tests_began)
    assert contents(tmp_path) == before
    assert not list(tmp_path.glob(".*"))
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_full_disk_gets_one_line_and_leaves_nothing(veneer, model, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    before = contents(tmp_path)
    assert_bad_input(veneer("quantize", model, tmp_path / "out", *INT8), "No space left")
    assert contents(tmp_path) == before


def test_an_internal_error_is_not_reported_as_bad_input(veneer, model, tmp_path, monkeypatch):
    def defect(*_):
        raise AssertionError("a defect")

    monkeypatch.setattr(FolderWriter, "finish", defect)
    monkeypatch.setattr(sys, "argv", ["veneer", "quantize", str(model), str(tmp_path / "o"), *INT8])
    with pytest.raises(AssertionError, match="a defect"):
        cli.main()
    assert not (tmp_path / "o").exists()


def test_a_value_error_after_writing_is_an_internal_error(veneer, model, tmp_path, monkeypatch):
    def defect(*_):
        raise ValueError("a defect")

    monkeypatch.setattr("veneer.quant.models.checkpoint.summarize", defect)
    monkeypatch.setattr(sys, "argv", ["veneer", "quantize", str(model), str(tmp_path / "o"), *INT8])
    with pytest.raises(ValueError, match="a defect"):
        cli.main()


def test_a_value_error_in_arithmetic_is_an_internal_error(model, tmp_path, monkeypatch):
    def defect(*_):
        raise ValueError("a defect")

    monkeypatch.setattr(vn.quant.Rule, "quantize", defect)
    monkeypatch.setattr(sys, "argv", ["veneer", "quantize", str(model), str(tmp_path / "o"), *INT8])
    with pytest.raises(ValueError, match="a defect"):
        cli.main()
    assert not (tmp_path / "o").exists()


def test_a_damaged_tensor_gets_one_line_and_leaves_nothing(veneer, tmp_path):
    vn.save(
        tmp_path / "saved", {"a.weight": normal(4, 8), "q": vn.quant.quantize(normal(4), "int8")}
    )
    described = tmp_path / "saved" / "veneer.json"
    described.write_text(described.read_text().replace('"shape": [4]', '"shape": [5]'))
    result = veneer("quantize", tmp_path / "saved", tmp_path / "out", *INT8)
    assert_bad_input(result, "tensor 'q' is stored as float32[4]")
    assert not (tmp_path / "out").exists()


def test_an_invalid_tile_in_a_rules_file_gets_advice(veneer, model, tmp_path):
    rules = [{"path": "embed.weight", "qtype": "int8", "tile_size": 3}]
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    result = veneer("quantize", model, tmp_path / "out", "--rules", tmp_path / "rules.json")
    assert_bad_input(result, "or leave it dense by a rule before the others whose qtype is null")


def rows_of(stdout):
    return {cells[0]: cells[1:] for line in stdout.splitlines() if (cells := line.split())}


@pytest.fixture
def out(veneer, model, tmp_path):
    veneer("quantize", model, tmp_path / "out", "--format", "nf4", "--tile", "4")
    return tmp_path / "out"


def test_inspect_shows_each_tensor(veneer, out):
    code, stdout, _ = veneer("inspect", out)
    rows = rows_of(stdout)
    assert code == 0
    assert {*MODEL} <= {*rows}
    scale = np.asarray(vn.load(out)["embed.weight"].scale)
    statistics = [f"{x:.3g}" for x in (scale.min(), np.median(scale), scale.max())]
    assert rows["embed.weight"] == [
        *("nf4,", "tile", "4", "[10,", "8]", str(10 * 4 + 10 * 2 * 4), "bytes", *statistics)
    ]
    assert rows["norm.weight"] == ["float32", "[8]", "32", "bytes"]


def test_inspect_shows_one_tensor(veneer, out):
    _, stdout, _ = veneer("inspect", out, "--tensor", "table")
    assert "table" in rows_of(stdout)
    assert "embed.weight" not in rows_of(stdout)


def test_inspect_shows_the_error_against_the_original(veneer, out, model):
    rows = rows_of(veneer("inspect", out, "--against", model)[1])
    w, q = MODEL["embed.weight"], vn.load(out)["embed.weight"].dequantize()
    error = np.linalg.norm(w - q) / np.linalg.norm(w)
    assert rows["embed.weight"][-1] == f"{error:.4f}"
    assert rows["norm.weight"][-1] == "0.0000"


def test_inspect_reads_files_of_other_libraries(veneer, model):
    for path in (model, model / "model.safetensors"):
        assert rows_of(veneer("inspect", path)[1])["table"] == [
            "float32",
            "[6,",
            "8]",
            "192",
            "bytes",
        ]


def test_names_in_brackets_are_shown_unchanged(veneer, tmp_path):
    vn.save(tmp_path / "out", {"[red]x[/red]": np.ones(2, np.float32)})
    assert "[red]x[/red]" in rows_of(veneer("inspect", tmp_path / "out")[1])


def other_shape(folder):
    save_file(MODEL | {"table": normal(2, 2)}, folder / "model.safetensors")


def without_table(folder):
    save_file({k: v for k, v in MODEL.items() if k != "table"}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(other_shape, "not the same model"), (without_table, "has no tensor 'table'")],
)
def test_inspect_rejects_another_model_as_the_original(veneer, out, model, spoil, message):
    spoil(model)
    assert_bad_input(veneer("inspect", out, "--against", model), message)


def test_inspect_verifies_the_output_of_quantize(veneer, out, model):
    code, stdout, _ = veneer("inspect", out, "--verify")
    assert code == 0
    assert stdout.endswith(
        f"verified: {len(MODEL)} tensors and veneer.json match their checksums\n"
    )
    assert "verified" not in veneer("inspect", out)[1]
    data = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 128]))
    assert_bad_input(veneer("inspect", out, "--verify"), "is damaged: the checksum of")
    assert_bad_input(veneer("inspect", model, "--verify"), "has no checksums")


def test_inspect_rejects_an_unknown_name(veneer, out):
    assert_bad_input(veneer("inspect", out, "--tensor", "tabel"), "has no tensor 'tabel'; it holds")


@needs("demo")
def test_demo_forwards_its_options(veneer, monkeypatch, tmp_path):
    from veneer.demo import encoder_demo, language_model

    calls = []

    def main(*args):
        *others, console = args
        console.print("a note")
        calls.append(tuple(others))
        return {"bytes": 1}

    monkeypatch.setattr(encoder_demo, "load", lambda path, console: path)
    monkeypatch.setattr(language_model, "load_model", lambda path, console: path)
    for part in (encoder_demo, language_model):
        monkeypatch.setattr(part, "main", main)
    monkeypatch.setattr(language_model, "QUESTION", "?")
    options = ["--model", tmp_path, "--gguf", tmp_path / "g", "--output", tmp_path / "o"]
    assert veneer("demo", *options)[0] == 0
    assert veneer("demo", *options, "--ask", "why")[0] == 0
    asked = [(tmp_path / "g", "?"), (tmp_path / "g", "why")]
    assert calls == [(tmp_path, tmp_path / "o"), asked[0], (tmp_path, tmp_path / "o"), asked[1]]
    code, stdout, stderr = veneer("demo", *options, "--json")
    assert (code, stderr) == (0, "a note\na note\n")
    assert json.loads(stdout) == {"encoder": {"bytes": 1}, "language_model": {"bytes": 1}}
    assert json.loads(stdout).keys() == COMMANDS["demo"].json_keys.keys()


@needs("demo")
def test_demo_rejects_a_wrong_model_in_one_line(veneer, tmp_path):
    assert_bad_input(veneer("demo", "--model", tmp_path / "nowhere"), "nowhere is not a folder")


ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("columns", ["60", "80"])
@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_main_help_cuts_no_summary(veneer, monkeypatch, arguments, columns):
    monkeypatch.setenv("COLUMNS", columns)
    code, stdout, _ = veneer(*arguments)
    assert code == 0
    assert "..." not in stdout.partition("Commands:")[2]
    for command in COMMANDS:
        assert re.search(rf"^  {command} +[A-Z].*\.$", stdout, re.MULTILINE)
    assert max(map(len, stdout.splitlines())) <= int(columns)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_fits_80_columns(veneer, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    code, stdout, stderr = veneer(command, "-h")
    assert (code, stderr) == (0, "")
    assert stdout == veneer(command, "--help")[1]
    assert max(map(len, stdout.splitlines())) <= 80
    assert not re.search("quantis|neighbour|colour", stdout, re.IGNORECASE)
    for line in COMMANDS[command].examples:
        assert f"\n  {line}\n" in stdout
    assert ("--json" in stdout) == bool(COMMANDS[command].json_keys) == (command != "convert")


ROW = r"\| `(\w+)` \| (\w+) \| ([\d.]+) \| ([\d.]+%) \| ([\d.]+%) \|"


def test_the_help_of_quantize_has_the_formats_of_the_page(veneer, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page = tables.Table("docs/formats.md", "| format | tile | bits ").text
    rows = {(name, tile): cells for name, tile, *cells in re.findall(ROW, page)}
    stdout = veneer("quantize", "--help")[1]
    for row in FORMAT_COSTS:
        name = vn.quant.get_format(row.name).name
        assert (row.bits, row.gaussian, row.minilm) == tuple(rows[name, row.tile])
        assert re.search(rf"^  {row.name} +{row.tile} +{row.bits} +{row.gaussian}", stdout, re.M)
    defaults = {row.name: default_tile(row.name) for row in FORMAT_COSTS}
    for name, tile in defaults.items():
        tile = tile or vn.quant.get_format(name).tile_size or "channel"
        assert (name, str(tile)) in {(row.name, row.tile) for row in FORMAT_COSTS}
    named = {
        vn.quant.get_format(name).name for name in (*MORE_FORMATS, *(r.name for r in FORMAT_COSTS))
    }
    assert named == vn.quant.FORMATS.keys() - {"int16"}  # int16 is for activations
    assert "[required unless --rules or --for is given]" in " ".join(stdout.split())


@pytest.mark.parametrize("row", FORMAT_COSTS, ids=lambda row: f"{row.name}-{row.tile}")
def test_the_table_of_formats_equals_computed_values(row):
    w = normal(64, 1024)
    options = {} if row.tile == "channel" else {"tiled_axes": {1: int(row.tile)}}
    if vn.quant.get_format(row.name).scale_dtype is None:
        options["scale_dtype"] = "bfloat16"
    q = vn.quant.quantize(w, row.name, channelwise_axes=[0], **options)
    error = np.linalg.norm(np.asarray(q.dequantize()) - w) / np.linalg.norm(w)
    assert error == pytest.approx(float(row.gaussian[:-1]) / 100, rel=0.03)
    assert 8 * q.nbytes / w.size == pytest.approx(float(row.bits), abs=0.02)


EXAMPLE_LINES = [("veneer", line) for line in EXAMPLES]
EXAMPLE_LINES += [(name, line) for name in COMMANDS for line in COMMANDS[name].examples]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGE_LINES = [
    (line.split()[1], line)
    for path in PAGES
    for block in re.findall(r"```sh\n(.*?)```", path.read_text("utf-8"), re.DOTALL)
    for line in block.splitlines()
    if line.startswith("veneer ")
]


@pytest.mark.parametrize(("command", "line"), EXAMPLE_LINES + PAGE_LINES, ids=lambda text: text)
def test_an_example_of_the_help_or_a_page_is_parsed(command, line):
    program = typer.main.get_command(cli.app)
    words = shlex.split(line, comments=True)[1:]
    with program.make_context("veneer", [*words], resilient_parsing="--help" in words) as context:
        name, subcommand, rest = program.resolve_command(context, words)
        assert command in ("veneer", name)
        subcommand.make_context(name, rest, parent=context, resilient_parsing="--help" in rest)


def test_the_examples_of_the_help_run(veneer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    weights = {name: normal(64, 64) for name in ("proj.weight", "lm_head.weight")}
    save_file(weights, "model/model.safetensors")
    save_file(weights, "model.safetensors")
    for path in ("model/config.json", "config.json"):
        (tmp_path / path).write_text(json.dumps(SMALL | {"num_attention_heads": 8}))
    (tmp_path / "rules.json").write_text('[{"path": ".*weight", "qtype": "int8"}]')
    packed_folder(tmp_path / "awq-model", "awq")
    write_gguf(
        tmp_path / "model.gguf",
        {"token_embd.weight": blocks_of("Q4_1", 32, 64)},
        _LLAMA | {"tokenizer.ggml.tokens": ["a", "b"]},
    )
    # The skipped ones need a real model, or take long.
    skipped = ("--calibrate", "--requantize", "veneer demo", "veneer doctor")
    skipped += ("veneer chat", "veneer compare")
    for line in dict.fromkeys(line for _, line in EXAMPLE_LINES):
        if not any(text in line for text in skipped):
            code, stdout, stderr = veneer(*shlex.split(line)[1:])
            assert code == 0, (line, stderr)
            if "--json" in line:
                json.loads(stdout)


def test_quantize_prints_json(veneer, model, tmp_path):
    code, stdout, stderr = veneer("quantize", model, tmp_path / "out", *INT8, "--json")
    assert (code, stderr) == (0, TABLE_IS_DENSE)
    found = json.loads(stdout)
    assert found.keys() == COMMANDS["quantize"].json_keys.keys()
    assert found["left_dense"] == ["table"]
    assert (found["path"], found["calibration"]) == (str(tmp_path / "out"), None)
    assert (found["already_quantized"], found["not_finite"]) == (0, [])
    for group in found["groups"]:
        assert all(key in COMMANDS["quantize"].json_keys["groups"] for key in group)
    groups = {group["name"]: group for group in found["groups"]}
    layers = groups["layers.*.proj.weight"]
    assert (layers["count"], layers["bytes_before"], layers["bytes_after"]) == (2, 192, 88)
    assert groups["norm.weight"]["relative_error"] is None
    after = sum(x.nbytes for x in vn.load(tmp_path / "out").values())
    assert found["total"]["bytes_after"] == pytest.approx(after, abs=41)  # int64 is int32 in JAX


def test_json_has_no_nan(veneer, tmp_path):
    save_file({"a.weight": np.full((4, 8), np.nan, np.float32)}, tmp_path / "model.safetensors")
    command = ("quantize", tmp_path / "model.safetensors", tmp_path / "out", *INT8, "--json")
    code, stdout, stderr = veneer(*command)
    assert (code, stderr) == (0, "veneer: warning: NaN or infinity in a.weight\n")
    found = json.loads(stdout, parse_constant=pytest.fail)
    assert found["not_finite"] == ["a.weight"]
    assert found["groups"][0]["relative_error"] is None


def test_inspect_prints_json(veneer, out, model):
    code, stdout, stderr = veneer("inspect", out, "--against", model, "--verify", "--json")
    assert (code, stderr) == (0, "")
    found = json.loads(stdout)
    assert found.keys() == COMMANDS["inspect"].json_keys.keys()
    assert (found["path"], found["family"], found["verified"]) == (str(out), None, True)
    assert found["bytes"] == sum(entry["bytes"] for entry in found["tensors"])
    tensors = {entry["name"]: entry for entry in found["tensors"]}
    scale = np.asarray(vn.load(out)["embed.weight"].scale)
    embedding = tensors["embed.weight"]
    assert embedding["shape"] == [10, 8]
    assert embedding["scale"]["max"] == pytest.approx(float(scale.max()))
    assert 0 < embedding["relative_error"] < 0.2
    assert tensors["norm.weight"]["scale"] is None
    named = {*embedding, *embedding["scale"]}
    assert all(key in COMMANDS["inspect"].json_keys["tensors"] for key in named)
    assert json.loads(veneer("inspect", out, "--json")[1])["tensors"][0]["relative_error"] is None


def test_version_prints_veneer_jax_and_python(veneer):
    code, stdout, stderr = veneer("--version")
    assert (code, stderr) == (0, "")
    assert stdout.startswith(f"veneer {vn.__version__} (JAX {jax.__version__}, Python ")


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_extra_is_reported_before_any_work(missing):
    program = (
        "import sys, importlib.util as util; find = util.find_spec\n"
        f"util.find_spec = lambda name: None if name == {missing!r} else find(name)\n"
        "from veneer.cli import main"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        f"veneer: error: the command line needs {missing}: "
        "pip install '.[cli]' in a clone of the repository\n"
    )


def test_importing_the_cli_loads_only_modules_for_help():
    heavy = ("safetensors", "rich.progress", "matplotlib", "tokenizers")
    program = f"import sys, veneer.cli; print([x for x in {heavy} if x in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def packed_folder(path, name="gptq"):
    tensors, _ = getattr(quantized_folders, name)(np.random.default_rng(0))
    return quantized_folders.write(path, tensors, quantization_config={"quant_method": name})


def test_inspect_shows_weights_of_other_libraries(veneer, tmp_path):
    code, stdout, stderr = veneer("inspect", packed_folder(tmp_path / "in"))
    assert (code, stderr) == (0, "")
    assert re.search(r"m\.weight +uint4, tile 32 +\[32, 96\]", stdout)
    assert "gptq: 2 tensors" in stdout


def test_quantize_rejects_a_quantized_checkpoint(veneer, tmp_path):
    result = veneer("quantize", packed_folder(tmp_path / "in"), tmp_path / "out", *INT8)
    assert_bad_input(result, "is already quantized (gptq). vn.load loads it packed")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def with_table(tmp_path):
    """Return a dense folder with an integer tensor named as a weight."""
    table = np.arange(6, dtype=np.int32).reshape(2, 3)
    (tmp_path / "in").mkdir()
    save_file({"a.weight": normal(4, 8), "t.weight": table}, tmp_path / "in" / "model.safetensors")
    return tmp_path / "in"


@pytest.mark.parametrize("command", ["quantize", "inspect", "convert"])
def test_integer_weights_are_read_with_raw(veneer, with_table, tmp_path, command):
    out = tmp_path / ("out.gguf" if command == "convert" else "out")
    arguments = {
        "quantize": (with_table, out, *INT8),
        "inspect": (with_table,),
        "convert": (with_table, out, "--format", "gguf"),
    }[command]
    message = (
        "'t.weight' (int32[2, 3]) looks like a part of a packed weight of an unknown format. "
        "--raw loads the stored tensors"
    )
    assert_bad_input(veneer(command, *arguments), message)
    assert not out.exists()
    code, stdout, _ = veneer(command, *arguments, "--raw")
    assert code == 0
    if command == "inspect":
        assert re.search(r"t\.weight +int32 +\[2, 3\]", stdout)
    else:
        loaded = vn.load(out)
        assert loaded["t.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert isinstance(loaded["a.weight"], vn.quant.QArray) == (command == "quantize")


def test_quantize_copies_quantized_tensors_of_a_saved_model(veneer, tmp_path):
    q = vn.quant.quantize(normal(4, 8), "int8")
    vn.save(tmp_path / "in", {"a": {"weight": q}, "b": {"weight": normal(4, 8)}})
    code, stdout, _ = veneer("quantize", tmp_path / "in", tmp_path / "out", *INT8)
    assert code == 0
    assert "1 tensor already quantized: copied unchanged" in stdout


def test_convert_writes_gptq_with_a_config(veneer, tmp_path):
    source = packed_folder(tmp_path / "in", "awq")
    (source / "tokenizer.json").write_text("{}")
    code, _, stderr = veneer("convert", source, tmp_path / "out", "--format", "gptq")
    assert (code, stderr) == (0, "")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "gptq"
    assert (tmp_path / "out" / "tokenizer.json").exists()
    x, y = (vn.load(path)["m.weight"] for path in (source, tmp_path / "out"))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, x, y))


_LLAMA = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 64,
    "llama.block_count": 1,
    "llama.context_length": 256,
    "llama.vocab_size": 32,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def test_convert_keeps_the_metadata_of_a_gguf_file(veneer, tmp_path):
    metadata = _LLAMA | {"tokenizer.ggml.tokens": ["a", "b"]}
    source = tmp_path / "in.gguf"
    tensors = {"token_embd.weight": blocks_of("Q4_1", 32, 64)}
    write_gguf(source, tensors | {"blk.0.attn_q.weight": blocks_of("Q8_0", 64, 64)}, metadata)
    assert veneer("convert", source, tmp_path / "out.gguf", "--format", "gguf")[0] == 0
    assert (tmp_path / "out.gguf").read_bytes() == source.read_bytes()
    assert veneer("convert", source, tmp_path / "mlx", "--format", "mlx")[0] == 0
    assert json.loads((tmp_path / "mlx" / "config.json").read_text())["hidden_size"] == 64
    read, dense = vn.load(tmp_path / "mlx"), vn.materialise(vn.load(source, names="huggingface"))
    assert read.keys() == dense.keys()
    assert all(np.array_equal(vn.materialise(read[name]), dense[name]) for name in dense)
    vn.save(
        tmp_path / "back.gguf",
        vn.load(source, names="huggingface"),
        format="gguf",
        config=metadata,
        names="huggingface",
    )
    assert (tmp_path / "back.gguf").read_bytes() == source.read_bytes()


def test_converting_a_folder_to_gguf_warns_of_missing_metadata(veneer, tmp_path):
    source = tmp_path / "in"
    w = vn.quant.quantize(jnp.ones((32, 64)), "int4", channelwise_axes=[0], scale_dtype="float16")
    vn.save(source, {"m.weight": w}, format="gptq")
    code, _, stderr = veneer("convert", source, tmp_path / "out.gguf", "--format", "gguf")
    assert code == 0
    assert "out.gguf has no metadata, and llama.cpp needs them" in stderr
    assert list(vn.load(tmp_path / "out.gguf")) == ["m.weight"]


def test_convert_names_tensors_that_a_format_cannot_hold(veneer, tmp_path):
    source = packed_folder(tmp_path / "in")
    result = veneer("convert", source, tmp_path / "out", "--format", "mlx")
    assert_bad_input(result, "format 'mlx' cannot hold 'm.weight': its zero points times")
    result = veneer("convert", source, tmp_path / "out", "--format", "onnx")
    assert_bad_input(result, "format must be one of gptq, awq, compressed-tensors, mlx and gguf")
    assert not (tmp_path / "out").exists()


def test_inspect_compares_packed_with_dense_weights(veneer, tmp_path):
    packed = packed_folder(tmp_path / "in")
    dense = {k: np.asarray(vn.materialise(v)) for k, v in vn.load(packed).items()}
    save_file(dense, tmp_path / "dense.safetensors")
    rows = rows_of(veneer("inspect", packed, "--against", tmp_path / "dense.safetensors")[1])
    assert rows["m.weight"][-1] == "0.0000"


@needs("demo")
def test_a_dense_gguf_file_becomes_a_folder_with_its_tokenizer(veneer, tmp_path):
    source = tmp_path / "in.gguf"
    embedding = np.arange(256, dtype=np.float32).reshape(4, 64)
    metadata = _LLAMA | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<end>"],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3],
    }
    write_gguf(source, {"token_embd.weight": embedding}, metadata)
    code, _, stderr = veneer("quantize", source, tmp_path / "out", "--format", "int8")
    assert (code, stderr) == (0, "")
    assert vn.load(tmp_path / "out")["model.embed_tokens.weight"].qtype == "int8"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())


def test_an_unknown_gguf_tokenizer_gives_a_warning(veneer, tmp_path):
    source = tmp_path / "in.gguf"
    metadata = _LLAMA | {"tokenizer.ggml.model": "bert"}
    write_gguf(source, {"token_embd.weight": np.ones((4, 64), np.float32)}, metadata)
    code, _, stderr = veneer("quantize", source, tmp_path / "out", "--format", "int8")
    assert code == 0
    assert "warning: the tokenizer is not copied" in stderr
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_convert_replaces_its_output_only_with_overwrite(veneer, tmp_path):
    source = tmp_path / "in.gguf"
    write_gguf(source, {"token_embd.weight": blocks_of("Q4_1", 32, 64)}, _LLAMA)
    convert = ("convert", source, tmp_path / "out", "--format", "mlx")
    assert veneer(*convert)[0] == 0
    code, _, stderr = veneer(*convert)
    assert code == 2
    assert "use another name, or --overwrite\n" in stderr
    assert veneer(*convert, "--overwrite")[0] == 0


def test_quantize_replaces_its_output_only_with_overwrite(veneer, model, tmp_path):
    quantize = ("quantize", model, tmp_path / "out", "--format")
    assert veneer(*quantize, "int8")[0] == 0
    code, _, stderr = veneer(*quantize, "int4")
    assert code == 2
    assert "use another name, or --overwrite\n" in stderr
    assert veneer(*quantize, "int4", "--overwrite")[0] == 0
    assert {qtype for qtype, _ in formats(tmp_path / "out").values()} == {"int4"}
    (tmp_path / "out" / "mine.txt").touch()
    assert_bad_input(veneer(*quantize, "int8", "--overwrite"), "mine.txt was not saved by veneer")
