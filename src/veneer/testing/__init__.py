"""Checks for the tests of those who write array types.

checks          check_rules: a type is held to the dense program, by the rules that it has
programs        what it is held to: programs of one array, of any shape
"""

from .checks import CheckedRules, check_rules

__all__ = ["CheckedRules", "check_rules"]

for _public in (CheckedRules, check_rules):
    _public.__module__ = "veneer.testing"
