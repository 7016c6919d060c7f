"""Examples of properties that depend on the property alone, and not on what ran before it.

Hypothesis, from 6.131 on, draws one value in twenty from the constants in the source of the local
modules that are imported by then, although it is told to derandomise. Which these are differs from
worker to worker, for veneer imports what is seldom used when it is used.
"""

from hypothesis.internal.conjecture import providers


def from_no_modules():
    """Has Hypothesis draw constants from its own list alone."""
    empty = getattr(providers, "_local_constants", None)  # as it is before any module is read
    providers._get_local_constants = lambda: empty
