"""What a share of the tests has in it."""

from itertools import product
from types import SimpleNamespace

import pytest
from support.shares import cases_of_share, quick_cases


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
def test_every_share_has_every_value_and_all_have_every_combination(n_shares):
    cases = all_of(format=["int8", "int4", "nf4"], tile=[None, 4], shape=[[3], [4, 5], [0], [1]])
    for share in shares_of(cases, n_shares):
        assert len(share) == len(cases) / n_shares
        for name, count in (("format", 3), ("tile", 2), ("shape", 4)):
            assert len({str(case.callspec.params[name]) for case in share}) == count


@pytest.mark.parametrize("cases", [[Case()], all_of(format=["int8", "int4", 1, True])])
def test_what_has_no_combinations_is_in_every_share(cases):
    assert shares_of(cases, 2) == [set(cases)] * 2


def test_a_case_of_a_divided_test_is_in_one_share():
    cases = all_of({"divided": {}}, format=range(20), shape=range(5))
    first, second = shares_of(cases, 2)
    assert not first & second
    assert 30 < len(first) < 70


def test_a_file_that_is_divided_from_others_is_in_one_share_alone():
    cases = all_of({"divided": {"by": "file"}}, format=range(20))
    assert sorted(map(len, shares_of(cases, 2))) == [0, 20]


# A quick run.


@pytest.mark.parametrize("n_tests", [1, 2, 3, 10])
def test_a_quick_run_has_every_value_in_each_file_and_some_of_each_test(n_tests):
    tests = [all_of(format=range(12), how=["a", "b", "c"]) for _ in range(n_tests)]
    kept = quick_cases(tests)
    of_each = [len(kept.intersection(cases)) for cases in tests]
    assert set(values_of("format", kept)) == set(range(12))
    assert set(values_of("how", kept)) == {"a", "b", "c"}
    assert len(kept) == max(12, n_tests)
    assert min(of_each) >= 1
    assert max(of_each) - min(of_each) <= 1


def test_what_one_test_alone_has_is_all_in_a_quick_run():
    shared, alone = all_of(format=range(10)), all_of(message=range(20))
    kept = quick_cases([shared, alone])
    assert kept == {*shared, *alone}


def test_values_meet_others_each_time():
    kept = quick_cases([all_of(format=range(6), how=["a", "b", "c"])])
    assert len(kept) == 6
    assert sorted(values_of("how", kept)) == ["a", "a", "b", "b", "c", "c"]


def test_a_test_without_parameters_is_in_a_quick_run():
    tests = [[Case()], [Case()], all_of(x=[[1], [2]])]
    assert quick_cases(tests) == {case for cases in tests for case in cases}


@pytest.mark.parametrize(("marker", "count"), [({}, 1), ({"quick": 0}, 0), ({"quick": 3}, 3)])
def test_of_a_long_test_a_quick_run_has_as_many_cases_as_it_says(marker, count):
    tests = [all_of({"long": marker}, x=range(5)), all_of(x=range(5))]
    kept = quick_cases(tests)
    assert len(kept.intersection(tests[0])) == count
    assert set(values_of("x", kept)) == set(range(5))
