"""A few random programs, the same in every run. `python -m fuzz` in tests/ runs more."""

import random

import pytest

from fuzz.checks import check
from fuzz.operands import KINDS
from fuzz.programs import program


@pytest.mark.parametrize("kind", KINDS)
def test_random_programs_agree_with_dense_arrays(kind):
    counts = [check(program(random.Random(f"{kind} {n}"), [kind])) for n in range(2)]
    assert set(counts) <= {"agrees", "refused", "invalid"}
