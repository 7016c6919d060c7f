"""Test the rules of an array type: `check_rules` and its result.

checks          `check_rules`: compare an implicit array with its dense array in many programs
programs        the test programs, for arrays of any shape
"""

from .checks import CheckedRules, check_rules

__all__ = ["CheckedRules", "check_rules"]

for _public in (CheckedRules, check_rules):
    _public.__module__ = "veneer.testing"


def __dir__() -> list[str]:
    return __all__
