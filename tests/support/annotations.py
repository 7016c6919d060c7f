"""Runs in which annotations are checked: there what is no argument at all is refused by its own."""

import jaxtyping
import pytest

ARE_CHECKED = not jaxtyping.config.jaxtyping_disable

#: Of a test of our words for an argument of another type than is annotated.
unless_checked = pytest.mark.skipif(ARE_CHECKED, reason="refused by its annotation before")
