"""What importing veneer costs, what it offers, and which of its rooms knows of which."""

import ast
import importlib.metadata
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from import_time import import_times

import veneer as vn

PACKAGE = Path(vn.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

# What the extras bring, and what would cost more to import than all of veneer.
LAZY = {"beartype", "matplotlib", "numba", "plum", "rich", "safetensors", "tokenizers", "typer"}

PUBLIC = [
    "OutsideImplicitError",
    *("AmbiguousLookupError", "ArrayLike", "ImplicitArray", "LeafAxis", "Value"),
    *("explain", "implicit", "jit", "load", "materialise", "quant", "register", "save", "static"),
    *(
        "device_put",
        "distributed",
        "freeze",
        "fully_sharded",
        "logical_shardings",
        "ste",
        "summary",
        "testing",
        "trainable",
        "tree",
        "types",
        "unfreeze",
    ),
]

# The arrows of docs/architecture.md: the rooms that a room may import from. Below `cli` and `demo`,
# nobody imports from `veneer` itself, which imports them all.
MAY_IMPORT = {
    "_install": set(),  # any package may import it
    "_jax": set(),
    "_core": {"_jax"},
    "_report": {"_core"},
    "native": set(),
    "kernels": {"_jax", "native"},
    "types": {"_jax", "_core", "kernels"},
    "quant": {"_jax", "_core", "_report", "kernels", "types"},
    "numba": {"_jax", "_core", "native", "types", "quant"},
    "hijax": {"_jax", "_core", "kernels", "types", "quant"},
    "interop": {
        *("_jax", "_core", "kernels", "types", "quant", "placement", "tree"),
    },
    "demo": {"veneer", "_core", "quant", "interop"},
    "doctor": {"_core", "kernels", "native", "quant"},
    "plan": {"_core", "_report", "quant", "placement"},
    "cli_help": set(),
    "cli": {"veneer", "_core", "_report", "quant", "interop", "demo", "doctor", "plan", "cli_help"},
    "__main__": {"cli"},
    "tree": {"_core"},
    "lora": {"_jax", "_core", "quant", "types"},
    "distributed": {"_jax", "_core", "quant"},
    "placement": {"_core", "tree"},
    "testing": {"_core", "_jax"},
    "training": {"_core", "types", "tree"},
    "parameter_table": {"_core", "_report", "quant", "tree", "training"},
    "veneer": {
        *("_core", "_report", "kernels", "types", "quant", "numba", "hijax", "interop"),
        *(
            "tree",
            "training",
            "parameter_table",
            "distributed",
            "placement",
            "testing",
            "lora",
        ),
    },
}


def room_of(module: str) -> str:
    """`veneer.quant.formats` is in the room `quant`; `veneer` is a room of its own."""
    _, _, inside = module.partition(".")
    return inside.split(".")[0] or "veneer"


def module_of(path: Path) -> str:
    parts = ("veneer", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Yield the full names that a module imports, at its top or inside its functions.

    `from a import b` yields `a.b`, which may be a module or a name within `a`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = [node.module] if node.module else []
            if node.level:
                package = module.split(".")
                origin = package[: len(package) - node.level + is_package] + origin
            yield from (".".join([*origin, alias.name]) for alias in node.names)


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return set(imported_by(tree, module_of(path), path.name == "__init__.py"))


def reached_from(path: Path) -> set[str]:
    """The rooms other than its own that a file of the package imports from."""
    inside = (name for name in imports_of(path) if name.split(".")[0] == "veneer")
    rooms = {room if room in MAY_IMPORT else "veneer" for room in map(room_of, inside)}
    return rooms - {room_of(module_of(path))}


def relative_name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a new interpreter holds once it has run `statement`."""
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return {name.partition(".")[0] for name in run.stdout.split()}


@pytest.mark.parametrize(
    ("module", "needed"), [("veneer", set()), ("veneer.quant", set()), ("veneer.cli", {"typer"})]
)
def test_import_leaves_the_extras_alone(module, needed):
    assert loaded_by(f"import {module}") & LAZY <= needed


def test_import_of_what_is_not_ours_is_left_for_later():
    # On two cores that do nothing else, 60 modules of ours take 25 ms, where JAX takes 600:
    # python benchmarks/import_time.py. A count is the same on every machine.
    loaded_by(
        "import jax, sys\nbefore = set(sys.modules)\nimport veneer\n"
        "added = set(sys.modules) - before\n"
        "ours = {name for name in added if name.partition('.')[0] == 'veneer'}\n"
        "assert len(ours) <= 65, sorted(ours)\n"
        "assert len(added - ours) <= 5, sorted(added - ours)"
    )


def test_import_takes_a_tenth_of_what_that_of_jax_does():
    # 40 ms, where JAX takes 400. Of rounds that other programs slow, one is enough to show it.
    shares = []
    while not shares or (min(shares) > 0.1 and len(shares) < 5):
        jax_time, ours = import_times("veneer", rounds=1)
        shares.append(ours / jax_time)
    assert min(shares) <= 0.1


def test_import_starts_no_backend():
    # A program may still have to choose its platform, its devices or its distributed setting.
    loaded_by(
        "import veneer, jax\n"
        "jax.config.update('jax_num_cpu_devices', 3)  # raises once a backend has started"
    )


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_offered(name):
    assert name in vn.__all__
    assert name in dir(vn)
    assert hasattr(vn, name)


def test_nothing_else_of_ours_is_public():
    ours = {
        name
        for name, value in vars(vn).items()
        if getattr(value, "__module__", "").partition(".")[0] == "veneer"
    }
    assert {name for name in ours if not name.startswith("_")} <= set(vn.__all__)


def test_a_module_takes_no_name_from_another():
    # A module, once imported, is an attribute of its package: in the place of a lazy name, if it
    # has that one.
    modules = "parameter_table, training, tree, types"
    loaded_by(
        f"import veneer as vn\nfrom veneer import {modules}\n"
        "assert all(callable(x) for x in (vn.freeze, vn.ste, vn.summary, vn.trainable))"
    )


def test_what_is_imported_lazily_is_not_imported_with_the_package():
    loaded_by(
        "import veneer, sys\n"
        "names = 'quant types tree training'.split()\n"
        "lazy = {f'veneer.{name}' for name in names}\n"
        "assert not lazy & set(sys.modules)"
    )


def test_every_name_in_all_exists():
    assert not [name for name in vn.__all__ if not hasattr(vn, name)]


@pytest.mark.parametrize("name", ["distributed", "hijax", "lora", "numba", "testing", "tree"])
def test_a_public_module_offers_only_its_own_names(name):
    module = getattr(vn, name)
    assert set(module.__all__) <= set(dir(module))
    for public in module.__all__:
        defined_in = getattr(getattr(module, public), "__module__", "veneer")
        assert defined_in.partition(".")[0] == "veneer"


def test_completion_shows_no_internals():
    names = "distributed hijax lora numba quant testing tree types".split()
    assert not [
        name for name in names if dir(getattr(vn, name)) != sorted(getattr(vn, name).__all__)
    ]
    assert set(dir(vn)) == {*vn.__all__, "__version__"}


def test_the_source_of_a_public_class_is_found():
    classes = [vn.ImplicitArray, vn.Value, vn.LeafAxis, vn.Event, vn.Report]
    assert all(inspect.getsource(cls).startswith(("class", "@")) for cls in classes)
    assert vn.OutsideImplicitError.__module__ == "veneer"


def test_the_version_is_that_of_the_distribution():
    try:
        installed = importlib.metadata.version("veneer")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("veneer is imported from its sources, and no distribution is installed")
    assert vn.__version__ == installed


def test_annotations_are_checked_at_run_time(pytestconfig):
    if not pytestconfig.getoption("--jaxtyping-packages"):
        pytest.skip("make test-all checks annotations")
    # The import hook must come before the first import of veneer, or it would check nothing.
    with pytest.raises(TypeError, match="precedence"):
        vn.register("neg", precedence="high")


@pytest.mark.parametrize("path", SOURCES, ids=relative_name)
def test_imports_follow_the_arrows(path):
    allowed = MAY_IMPORT[room_of(module_of(path))] | {"_install"}
    assert reached_from(path) <= allowed


@pytest.mark.parametrize("path", SOURCES, ids=relative_name)
def test_imports_no_example(path):
    assert not [name for name in imports_of(path) if name.split(".")[0] == "examples"]


def test_private_jax_is_imported_in_one_room():
    found = {
        relative_name(path)
        for path in SOURCES
        if any(name.startswith("jax._src") for name in imports_of(path))
    }
    assert {name.partition("/")[0] for name in found} == {"_jax"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import jax._src.core", "jax._src.core"),
        ("from jax import _src", "jax._src"),
        ("def f():\n    from ..quant.arrays import qarray", "veneer.quant.arrays.qarray"),
        ("from . import value", "veneer._core.value"),
        ("from .value import Value", "veneer._core.value.Value"),
        ("import veneer as vn", "veneer"),
    ],
)
def test_imports_are_found(source, expected):
    assert list(imported_by(ast.parse(source), "veneer._core.rules", is_package=False)) == [
        expected
    ]


def test_relative_imports_of_a_package_are_found():
    names = imported_by(ast.parse("from .ops import dot_general"), "veneer.quant", True)
    assert list(names) == ["veneer.quant.ops.dot_general"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("quantize", "quant.quantize"), ("QArray", "quant.QArray"), ("LoraArray", "types.LoraArray")],
)
def test_a_missing_name_suggests_its_module(name, meant):
    with pytest.raises(AttributeError, match=rf"'{name}'; did you mean vn\.{meant}\?"):
        getattr(vn, name)


@pytest.mark.parametrize("name", ["unknown", "jax", "Sequence", "policy_in_force"])
def test_a_name_that_is_not_public_suggests_nothing(name):
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'$"):
        getattr(vn, name)
