"""What a share of the tests has in it."""

from itertools import product
from types import SimpleNamespace

import pytest
from support.shares import cases_of_share


class Case:
    def __init__(self, divided=None, **params):
        self.nodeid, self.divided = f"file.py::test[{params}]", divided
        if params:
            self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name):
        return pytest.mark.divided(**self.divided).mark if self.divided is not None else None


def all_of(divided=None, **values):
    return [
        Case(divided, **dict(zip(values, case, strict=True))) for case in product(*values.values())
    ]


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
    cases = all_of(divided={}, format=range(20), shape=range(5))
    first, second = shares_of(cases, 2)
    assert not first & second
    assert 30 < len(first) < 70


def test_a_file_that_is_divided_from_others_is_in_one_share_alone():
    cases = all_of(divided={"by": "file"}, format=range(20))
    assert sorted(map(len, shares_of(cases, 2))) == [0, 20]
