"""The examples as modules, and a small random encoder for them to train."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples"))


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """The encoder that the tests of the demo read: two layers, four heads, twelve words."""
    from veneer.demo.encoder import load

    path = ROOT / "tests" / "demo" / "conftest.py"
    spec = importlib.util.spec_from_file_location("tests_of_the_demo", path)
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    return load(demo.write_folder(tmp_path_factory.mktemp("model") / "bert", demo.bert_params()))
