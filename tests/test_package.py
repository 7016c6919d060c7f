"""The cost of importing veneer, its public names, and the imports between its packages."""

import ast
import importlib.metadata
import inspect
import re
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

ARCHITECTURE = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text("utf-8")


def imports_of_the_page() -> dict[str, set[str]]:
    """The table of packages in docs/architecture.md: the packages that each package imports."""
    rows = re.findall(r"^\| `(\w+)` \| .*? \| ?([^|]*)\|$", ARCHITECTURE, re.MULTILINE)
    return {package: set(re.findall(r"`(\w+)`", imports)) for package, imports in rows}


IMPORTS = imports_of_the_page()


def package_of(module: str) -> str:
    """`quant` of `veneer.quant.formats`; `veneer` of `veneer` itself."""
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
    """The other packages that a file imports."""
    inside = (name for name in imports_of(path) if name.split(".")[0] == "veneer")
    packages = {name if name in IMPORTS else "veneer" for name in map(package_of, inside)}
    return packages - {package_of(module_of(path))}


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


@pytest.mark.parametrize("package", sorted(IMPORTS))
def test_a_package_imports_what_the_page_says(package):
    files = [path for path in SOURCES if package_of(module_of(path)) == package]
    imported = set().union(*map(reached_from, files)) - {"_install"}
    assert files
    assert imported == IMPORTS[package]


def test_the_page_lists_every_package():
    assert IMPORTS.keys() == {package_of(module_of(path)) for path in SOURCES}


@pytest.mark.parametrize("path", SOURCES, ids=relative_name)
def test_imports_no_example(path):
    assert not [name for name in imports_of(path) if name.split(".")[0] == "examples"]


def test_only_one_package_imports_private_jax():
    importers = {
        relative_name(path)
        for path in SOURCES
        if any(name.startswith("jax._src") for name in imports_of(path))
    }
    assert {name.partition("/")[0] for name in importers} == {"_jax"}


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
