"""The structure of the package: imports, maps of modules, and docs/architecture.md."""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from support import call_paths
from support.mutations import MUTATIONS, ROOT, found_in
from test_package import PACKAGE, SOURCES, imported_by, module_of, relative_name

DOCS = Path(__file__).parent.parent / "docs"
ARCHITECTURE = (DOCS / "architecture.md").read_text("utf-8")
MODULES = {module_of(path): path for path in SOURCES}
PACKAGES = [path for path in SOURCES if path.name == "__init__.py"]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def modules_imported_by(path: Path) -> set[str]:
    """Return the modules of veneer that a file imports, except for annotations alone."""
    tree = _WithoutTypeChecking().visit(ast.parse(path.read_text("utf-8")))
    names = imported_by(tree, module_of(path), path.name == "__init__.py")
    modules = {name if name in MODULES else name.rpartition(".")[0] for name in names}
    return (modules & MODULES.keys()) - {module_of(path)}


class _WithoutTypeChecking(ast.NodeTransformer):
    def visit_If(self, node):
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle. Empty if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_modules_do_not_import_each_other_in_a_circle():
    # `from . import x` counts as an import of x, so a package may import its modules.
    graph = {name: modules_imported_by(path) for name, path in MODULES.items()}
    assert sum(map(len, graph.values())) > len(MODULES)
    assert find_circle(graph) == []


def test_find_circle_returns_a_circle():
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(find_circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


def test_imports_in_functions_count_and_for_annotations_do_not(tmp_path, monkeypatch):
    path = tmp_path / "module.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from veneer import tree\n"
        "def f():\n    from veneer import training\n    from veneer._core.value import Value\n"
    )
    monkeypatch.setitem(globals(), "module_of", lambda path: "veneer.module")
    assert modules_imported_by(path) == {"veneer.training", "veneer._core.value"}


def mapped_modules(text: str) -> set[str]:
    """Return the modules that the docstring of a package lists: `    name, other   contents`."""
    names: set[str] = set()
    for line in text.split("\n"):
        entry = re.match(r"(?: {4})?(\w+(?:, \w+)*) {2,}\S", line)
        if entry:
            names.update(entry[1].split(", "))
    return names


@pytest.mark.parametrize("path", PACKAGES, ids=relative_name)
def test_a_package_maps_its_modules(path):
    inside = {p.stem for p in path.parent.glob("*.py")} - {"__init__", "__main__"}
    inside |= {p.parent.name for p in path.parent.glob("*/__init__.py")}
    assert mapped_modules(ast.get_docstring(tree_of(path), clean=False) or "") == inside


def siblings_imported_by(folder: Path) -> set[str]:
    """Return the packages and modules beside a package (or module) that its files import."""
    parent = module_of(folder.parent / "__init__.py") + "."
    files = [*folder.rglob("*.py"), *folder.parent.glob(f"{folder.name}.py")]
    assert files, folder
    modules = (m for path in files for m in modules_imported_by(path))
    inside = {m.removeprefix(parent).split(".")[0] for m in modules if m.startswith(parent)}
    return inside - {folder.name}


def folders_imported_by(folder: Path) -> set[str]:
    """Return the packages beside a package that its files import, without modules."""
    return {name for name in siblings_imported_by(folder) if (folder.parent / name).is_dir()}


def test_quant_lists_its_parts_in_the_order_of_imports():
    text = ast.get_docstring(tree_of(PACKAGE / "quant" / "__init__.py"), clean=False) or ""
    order = re.findall(r"^ {4}(\w+) {2,}\S", text, re.MULTILINE)
    assert len(order) > 5
    for i, name in enumerate(order):
        assert siblings_imported_by(PACKAGE / "quant" / name) <= set(order[:i]), name


def test_folders_do_not_import_each_other_in_a_circle():
    folder_of = lambda path: path.parent.relative_to(PACKAGE).as_posix().removeprefix(".")
    # An `__init__` without functions and classes only lists the modules of its package. That of
    # Quax also imports its examples.
    is_code = {path: path.name != "__init__.py" or has_definitions(path) for path in SOURCES}
    is_code[PACKAGE / "interop" / "quax" / "__init__.py"] = False
    graph: dict[str, set[str]] = defaultdict(set)
    for path in filter(is_code.get, SOURCES):
        imported = filter(is_code.get, (MODULES[name] for name in modules_imported_by(path)))
        graph[folder_of(path)] |= {folder_of(p) for p in imported} - {folder_of(path)}
    assert find_circle(graph) == []


def has_definitions(path: Path) -> bool:
    definitions = ast.FunctionDef | ast.ClassDef
    return any(isinstance(x, definitions) and x.name[:2] != "__" for x in tree_of(path).body)


def test_core_modules_import_only_earlier_modules():
    """The map of `_core` lists its modules in import order. They may also import `_jax`."""
    core = PACKAGE / "_core"
    text = ast.get_docstring(tree_of(core / "__init__.py"), clean=False) or ""
    order = re.findall(r"^ {4}(\w+) {2,}\S", text, re.MULTILINE)
    assert set(order) == {path.stem for path in core.glob("*.py")} - {"__init__"} | {
        *("primitives", "surface")
    }
    for i, name in enumerate(order[:-2]):
        imported = {
            module.removeprefix("veneer._core.")
            for module in modules_imported_by(core / f"{name}.py")
            if not module.startswith("veneer._jax")
        }
        assert imported <= set(order[:i]), name
    assert folders_imported_by(core / "primitives") == set()
    assert folders_imported_by(core / "surface") == {"primitives"}


def test_class_names_are_unique():
    places = defaultdict(list)
    for path in SOURCES:
        for node in tree_of(path).body:
            has_name_of_another_library = "interop/" in relative_name(path) and not (
                isinstance(node, ast.ClassDef) and node.name.startswith("_")
            )
            if isinstance(node, ast.ClassDef) and not has_name_of_another_library:
                places[node.name.lstrip("_")].append(relative_name(path))
    del places["Rule"]  # `vn.quant.Rule`, and `vn.lora.Rule`
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_examples_and_benchmarks_have_different_names():
    # Both are imported by their names alone.
    names = [{path.name for path in (ROOT / of).glob("*.py")} for of in ("examples", "benchmarks")]
    assert all(names)
    assert not set.intersection(*names)


def test_only_tests_of_benchmarks_import_benchmarks():
    names = "|".join(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    imports = re.compile(rf"^\s*(?:from|import) (?:{names})\b", re.MULTILINE)
    tests = [path for path in (ROOT / "tests").rglob("*.py") if imports.search(path.read_text())]
    assert {path.parent.name for path in tests} == {"benchmarks"}


def private_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and (node.level or "veneer" in (node.module or "")):
            names = [alias.name for alias in node.names]
            package = MODULES.keys()
            yield from (n for n in names if n.startswith("_") and f"veneer.{n}" not in package)


@pytest.mark.parametrize("path", SOURCES, ids=relative_name)
def test_private_names_stay_in_their_files(path):
    assert list(private_imports(path)) == []


def call_paths_of_the_page() -> dict[str, list[str]]:
    """The steps of each call path on the page, as `file:function`."""
    section = ARCHITECTURE.partition("\n## Call paths\n")[2]
    paths: dict[str, list[str]] = {}
    for part in section.split("\n### ")[1:]:
        title, _, text = part.partition("\n")
        paths[title.strip("`")] = re.findall(r"`([\w/]+\.py:[\w.]+)`", text)
    return paths


def test_the_page_has_every_call_path():
    assert call_paths_of_the_page().keys() == call_paths.PROGRAMS.keys()


@pytest.mark.slow  # compiling the programs takes 15 seconds
@pytest.mark.parametrize("name", call_paths.PROGRAMS)
def test_a_call_takes_the_steps_that_the_page_names(name):
    named = call_paths_of_the_page()[name]
    steps = call_paths.steps_of_cached(name)
    assert len(named) >= 8
    assert [step for step in named if step not in steps] == []
    assert named == sorted(named, key=steps.index)


def test_the_page_names_every_package():
    packages = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGES} - {"."}
    named = set(re.findall(r"`([\w/]+)`", ARCHITECTURE))
    assert packages <= named


def test_files_that_the_page_names_exist():
    files = set(re.findall(r"`([\w/]+\.py)(?::[\w.]+)?`", ARCHITECTURE))
    assert {name for name in files if not (PACKAGE / name).exists()} == set()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.new[:40])
def test_the_text_of_each_mutation_is_in_the_source(mutation):
    """A change of the source must also change `tests/support/mutations.py`."""
    assert found_in(ROOT, mutation).is_file()
    assert all((ROOT / "tests" / path).exists() for path in mutation.tests.split())
