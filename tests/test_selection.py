"""Test the choice of cases, the number of workers, optional libraries and the environment."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from support import environment, hooks, memory, optional
from support.memory import LIMIT, STEP
from support.selection import (
    BUDGET,
    LONGEST,
    cases_of_share,
    in_part,
    move_kernels_to_the_middle,
    parse_fraction,
    quick_cases,
    quick_limit,
    recorded_durations,
)

ROOT = Path(__file__).parents[1]


class Case:
    def __init__(self, markers=None, **params):
        self.nodeid, self.markers = f"file.py::test[{params}]", markers or {}
        if params:
            self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name):
        return SimpleNamespace(kwargs=self.markers[name]) if name in self.markers else None


def all_of(markers=None, **values):
    return [
        Case(markers, **dict(zip(values, case, strict=True))) for case in product(*values.values())
    ]


def values_of(name, cases):
    return [case.callspec.params[name] for case in cases]


def shares_of(cases, n_shares):
    shares = [cases_of_share(cases, share, n_shares) for share in range(1, n_shares + 1)]
    assert set().union(*shares) == set(cases)
    return shares


@pytest.mark.parametrize("n_shares", [1, 2, 3])
def test_each_share_has_each_value_and_together_all_combinations(n_shares):
    cases = all_of(format=["int8", "int4", "nf4"], tile=[None, 4], shape=[[3], [4, 5], [0], [1]])
    for share in shares_of(cases, n_shares):
        assert len(share) == len(cases) / n_shares
        for name, count in (("format", 3), ("tile", 2), ("shape", 4)):
            assert len({str(case.callspec.params[name]) for case in share}) == count


def test_kernels_start_the_second_half():
    names = ["core/a", "kernels/b", "numba/c", "quant/d", "quant/ops/e", "types/f"]
    items = [SimpleNamespace(nodeid=f"tests/{name}.py::test") for name in names]
    move_kernels_to_the_middle(items)
    order = [item.nodeid[len("tests/") : -len(".py::test")] for item in items]
    assert order == ["core/a", "numba/c", "quant/d", "kernels/b", "quant/ops/e", "types/f"]


def test_every_case_is_in_one_sample():
    cases = all_of(format=range(30))
    for case in cases:
        assert [in_part(case, part, 3) for part in (1, 2, 3)].count(True) == 1
    assert 3 < sum(in_part(case, 1, 3) for case in cases) < 20


@pytest.mark.parametrize("cases", [[Case()], all_of(format=["int8", "int4", 1, True])])
def test_cases_without_combinations_are_in_every_share(cases):
    assert shares_of(cases, 2) == [set(cases)] * 2


def test_a_case_of_a_divided_test_is_in_one_share():
    cases = all_of({"divided": {}}, format=range(20), shape=range(5))
    first, second = shares_of(cases, 2)
    assert not first & second
    assert 30 < len(first) < 70


def test_a_file_divided_by_file_is_in_one_share():
    cases = all_of({"divided": {"by": "file"}}, format=range(20))
    assert sorted(map(len, shares_of(cases, 2))) == [0, 20]


# Quick runs.


def all_cases(tests):
    return quick_cases(tests, [len(cases) for cases in tests])


@pytest.mark.parametrize("n_tests", [1, 2, 3, 10])
def test_quick_run_tries_every_value_in_each_file_and_every_test(n_tests):
    tests = [all_of(format=range(12), how=["a", "b", "c"]) for _ in range(n_tests)]
    kept = all_cases(tests)
    of_each = [len(kept.intersection(cases)) for cases in tests]
    assert set(values_of("format", kept)) == set(range(12))
    assert set(values_of("how", kept)) == {"a", "b", "c"}
    assert len(kept) == max(12, n_tests)
    assert min(of_each) >= 1
    assert max(of_each) - min(of_each) <= 1


def test_quick_run_tries_all_values_of_an_unshared_parameter():
    shared, alone = all_of(format=range(10)), all_of(message=range(20))
    assert all_cases([shared, alone]) == {*shared, *alone}


def test_quick_run_combines_values_evenly():
    kept = all_cases([all_of(format=range(6), how=["a", "b", "c"])])
    assert len(kept) == 6
    assert sorted(values_of("how", kept)) == ["a", "a", "b", "b", "c", "c"]


def test_quick_run_has_tests_without_parameters():
    tests = [[Case()], [Case()], all_of(x=[[1], [2]])]
    assert all_cases(tests) == {case for cases in tests for case in cases}


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_quick_run_respects_the_limit_of_cases(limit):
    tests = [all_of(x=range(5)), all_of(x=range(5))]
    kept = quick_cases(tests, [limit, 5])
    assert len(kept.intersection(tests[0])) == limit
    assert set(values_of("x", kept)) == set(range(5))


@pytest.mark.parametrize(
    ("markers", "seconds", "limit"),
    [
        ({}, 0, 5),
        ({}, BUDGET / 2.5, 2),
        ({}, BUDGET * 2, 1),
        ({}, LONGEST + 1, 0),
        ({"slow": {}}, 0, 0),
    ],
)
def test_limit_follows_the_recorded_duration(markers, seconds, limit):
    cases = all_of(markers, x=range(5))
    assert quick_limit(cases, {"file.py::test": seconds} if seconds else {}) == limit


@pytest.mark.parametrize("text", ["3/2", "0/2", "1", "1/0", "a/b", ""])
def test_a_wrong_fraction_is_rejected_with_the_rule(text):
    with pytest.raises(pytest.UsageError, match="--share takes I/N, 1 <= I <= N"):
        parse_fraction("share", text)
    assert parse_fraction("share", "10/12") == (10, 12)


def test_recorded_durations_name_tests_that_exist():
    files = {test.partition("::")[0] for test in recorded_durations()}
    assert [file for file in files if not (ROOT / file).exists()] == []


# The set-up of a run.


def test_collection_compiles_nothing(compiled_while_collecting):
    assert compiled_while_collecting == {}
    before = hooks.compiled_programs
    with jax.disable_jit(False):
        jax.jit(lambda x: x + 3)(1.0)
    assert hooks.compiled_programs > before


@pytest.mark.parametrize(("gigabytes", "workers"), [(0.1, 1), (2, 1), (5, 3), (1000, 16)])
def test_workers_fit_into_the_memory(monkeypatch, gigabytes, workers):
    monkeypatch.setattr(memory, "available_bytes", lambda: int(gigabytes * 1e9))
    monkeypatch.setattr(memory, "number_of_cpus", lambda: 16)
    assert memory.number_of_workers() == workers


def test_a_worker_releases_programs_above_its_limit(monkeypatch):
    released, resident = [], iter([LIMIT, LIMIT + 1, 2 * LIMIT, 2 * LIMIT + STEP, 3 * LIMIT, 0])
    monkeypatch.setattr(memory, "resident_bytes", lambda: next(resident))
    monkeypatch.setattr(memory, "release_programs", lambda: released.append(True))
    releaser = memory.ProgramReleaser()
    counts = []
    for _ in range(4):
        releaser.check()
        counts.append(len(released))
    # The second check leaves 2 * LIMIT resident, so the next limit is a STEP above that.
    assert counts == [0, 1, 1, 2]
    assert releaser.limit == LIMIT


def test_releasing_programs_keeps_results():
    double = jax.jit(lambda x: 2 * x)
    before = double(1.0)
    memory.release_programs()
    assert double(1.0) == before == 2


def test_missing_library_is_found_in_the_cause_of_an_error(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    error = ImportError("install veneer[demo]")
    error.__cause__ = ModuleNotFoundError("No module named 'flax.nnx'", name="flax.nnx")
    assert optional.missing_modules(error) == ["flax.nnx"]
    monkeypatch.setattr(optional, "find_spec", lambda name: None)
    assert optional.reason_to_skip(["flax.nnx"]) == "needs flax: pip install --group dev"
    assert optional.reason_to_skip(optional.missing_modules(AssertionError())) is None
    assert optional.reason_to_skip(["pytensor"]) == "needs pytensor: pip install '.[pytensor]'"
    assert optional.reason_to_skip(["numpy"]) is None
    monkeypatch.setenv("CI", "true")
    assert optional.reason_to_skip(["flax"]) is None


def test_flags_of_the_user_override_defaults():
    environ = {"XLA_FLAGS": "--xla_backend_optimization_level=3"}
    environment.set_defaults(environ)
    environment.set_defaults(environ)  # as a worker does
    assert environ["XLA_FLAGS"].split()[0] == "--xla_backend_optimization_level=0"
    assert environ["XLA_FLAGS"].split()[-1] == "--xla_backend_optimization_level=3"
    assert len(environ["XLA_FLAGS"].split()) == 1 + len(environment.xla_flags())
