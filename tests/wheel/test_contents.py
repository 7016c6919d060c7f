"""The contents of the wheel, which is built from the source distribution as in a release."""

import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from support import optional

import veneer as vn

pytestmark = optional.needs("build")

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"
FROM_EXAMPLES = {"veneer/demo/sentence_encoder.py"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    environment = {**os.environ, "VENEER_REPOSITORY": "a/b"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = (path for path in (SOURCES / "veneer").rglob("*") if path.is_file())
    sources = {path.relative_to(SOURCES).as_posix() for path in package}
    sources = {name for name in sources if "__pycache__" not in name}
    assert held == sources | FROM_EXAMPLES
    assert {"veneer/py.typed", "veneer/kernels/gpu/matmul.cu"} <= held


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_is_small_and_has_the_version(wheel, metadata):
    # It has only sources. A file of data that is packed by mistake would exceed this.
    assert wheel.stat().st_size <= 1.25 * 2**20
    assert wheel.name == f"veneer-{vn.__version__}-py3-none-any.whl"
    assert metadata["Version"] == vn.__version__
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    names = sorted(line.partition("<")[0].partition(">")[0] for line in needed)
    assert names == ["jax", "numpy", "safetensors"]


def test_the_metadata_name_the_project(metadata):
    assert metadata["Author"] == "The Veneer authors"
    assert metadata["License-Expression"] == "Apache-2.0"
    # A build outside GitHub Actions has no URLs: the address of the repository is not known.
    assert metadata.get_all("Project-URL") == [
        "Documentation, https://a.github.io/b/latest/",
        "Repository, https://github.com/a/b",
        "Issues, https://github.com/a/b/issues",
        "Changelog, https://github.com/a/b/blob/main/CHANGELOG.md",
    ]


def test_the_classifiers_exist(metadata):
    known = pytest.importorskip("trove_classifiers").classifiers
    assert not set(metadata.get_all("Classifier")) - known


def test_the_sdist_has_tests_docs_and_examples(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/conftest.py", "docs/README.md", "examples/whisper.py", "Makefile"} <= held
    assert not [name for name in held if "__pycache__" in name or name.startswith(".venv")]
