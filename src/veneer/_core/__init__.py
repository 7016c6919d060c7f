"""The core: implicit values, rules, and the transform that runs them.

It knows no concrete type, and its modules import in one direction: jax_internals, explain, tree,
operators, value, rules, custom_derivatives, trace, transform; then higher_order, whose rules
complete it.
"""

from pathlib import Path

from . import higher_order as higher_order
from . import jax_internals

jax_internals.hide_frames_of(Path(__file__).parent.parent)
