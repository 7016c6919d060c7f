"""Hypothesis examples are the same in every run."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

PROPERTY = """
from hypothesis import given, strategies as st
{imports}

@given(st.lists(st.integers(0, 10**9), min_size=400, max_size=400))
def test_property(numbers):
    print("drawn", hash(tuple(numbers)))
"""


@pytest.mark.parametrize("profile", ["all", "quick"])
def test_every_profile_draws_the_same_examples_each_time(profile):
    chosen = settings.get_profile(profile)
    assert chosen.derandomize
    assert chosen.database is None


def test_examples_do_not_depend_on_imports(tmp_path):
    def drawn(imports):
        here = Path(__file__).parent
        (tmp_path / "conftest.py").write_text(
            f"import sys; sys.path.insert(0, {str(here)!r})\n" + (here / "conftest.py").read_text()
        )
        (tmp_path / "constants.py").write_text(f"NUMBERS = {list(range(500))}")
        (tmp_path / "test_it.py").write_text(PROPERTY.format(imports=imports))
        options = ["-p", "no:cacheprovider", "-q", "-s", "--rootdir", str(tmp_path)]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "test_it.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return [line for line in done.stdout.splitlines() if "drawn" in line]

    assert drawn("") == drawn("import constants")
    assert drawn("")
