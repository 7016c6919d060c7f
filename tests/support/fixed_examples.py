"""Make the examples of Hypothesis independent of the modules that are imported.

From version 6.131, Hypothesis draws one value in twenty from constants in the source of imported
local modules, even with `derandomize`. veneer imports many modules lazily, so each worker would
draw other values.
"""

from hypothesis.internal.conjecture import providers


def from_no_modules():
    """Make Hypothesis draw constants only from its own list."""
    empty = getattr(providers, "_local_constants", None)  # not filled yet
    providers._get_local_constants = lambda: empty
