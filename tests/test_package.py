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

import veneer as vn

PACKAGE = Path(vn.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Libraries that an import of veneer must not load: extras, and libraries that load slowly.
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
    """Return the packages that each package imports, from the table in docs/architecture.md."""
    rows = re.findall(r"^\| `(\w+)` \| .*? \| ?([^|]*)\|$", ARCHITECTURE, re.MULTILINE)
    return {package: set(re.findall(r"`(\w+)`", imports)) for package, imports in rows}


IMPORTS = imports_of_the_page()


def package_of(module: str) -> str:
    """Return `quant` for `veneer.quant.formats`, and `veneer` for `veneer` itself."""
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


def packages_imported_by(path: Path) -> set[str]:
    """Return the other packages that a file imports."""
    inside = (name for name in imports_of(path) if name.split(".")[0] == "veneer")
    packages = {name if name in IMPORTS else "veneer" for name in map(package_of, inside)}
    return packages - {package_of(module_of(path))}


def relative_name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def modules_loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that a statement loads in a new interpreter."""
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return {name.partition(".")[0] for name in run.stdout.split()}


@pytest.mark.parametrize(
    ("module", "needed"), [("veneer", set()), ("veneer.quant", set()), ("veneer.cli", {"typer"})]
)
def test_import_loads_no_extra(module, needed):
    assert modules_loaded_by(f"import {module}") & LAZY <= needed


def test_import_loads_few_modules():
    # `python benchmarks/import_time.py` measures the time. A count is the same on every machine.
    modules_loaded_by(
        "import jax, sys\nbefore = set(sys.modules)\nimport veneer\n"
        "added = set(sys.modules) - before\n"
        "ours = {name for name in added if name.partition('.')[0] == 'veneer'}\n"
        "assert len(ours) <= 65, sorted(ours)\n"
        "assert len(added - ours) <= 5, sorted(added - ours)"
    )


def test_import_starts_no_backend():
    # A program may still have to choose its platform, its devices or its distributed setting.
    modules_loaded_by(
        "import veneer, jax\n"
        "jax.config.update('jax_num_cpu_devices', 3)  # raises once a backend has started"
    )


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_exist(name):
    assert name in vn.__all__
    assert name in dir(vn)
    assert hasattr(vn, name)


def test_all_public_names_are_in_all():
    ours = {
        name
        for name, value in vars(vn).items()
        if getattr(value, "__module__", "").partition(".")[0] == "veneer"
    }
    assert {name for name in ours if not name.startswith("_")} <= set(vn.__all__)


def test_importing_a_module_hides_no_public_name():
    # An imported module becomes an attribute of its package, and could replace a lazy name.
    modules = "parameter_table, training, tree, types"
    modules_loaded_by(
        f"import veneer as vn\nfrom veneer import {modules}\n"
        "assert all(callable(x) for x in (vn.freeze, vn.ste, vn.summary, vn.trainable))"
    )


def test_lazy_modules_are_not_loaded_with_the_package():
    modules_loaded_by(
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


def test_the_version_equals_the_version_of_the_distribution():
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
def test_a_package_imports_only_the_packages_of_the_page(package):
    files = [path for path in SOURCES if package_of(module_of(path)) == package]
    imported = set().union(*map(packages_imported_by, files))
    assert files
    assert imported == IMPORTS[package]


def test_the_page_lists_every_package():
    assert IMPORTS.keys() == {package_of(module_of(path)) for path in SOURCES}


@pytest.mark.parametrize("path", SOURCES, ids=relative_name)
def test_the_package_imports_no_example(path):
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
def test_imported_by_finds_every_import(source, expected):
    assert list(imported_by(ast.parse(source), "veneer._core.rules", is_package=False)) == [
        expected
    ]


def test_imported_by_resolves_relative_imports():
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
