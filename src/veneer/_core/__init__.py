"""The core: implicit values, rules, and the transform that runs them.

It knows no concrete type, and its modules import in one direction: jax_internals, explain, tree,
value, rules, custom_derivatives, trace, transform; then operators and array for the class that
users see, and higher_order, whose rules complete the transform.
"""

from pathlib import Path

from . import higher_order as higher_order
from . import jax_internals

jax_internals.hide_frames_of(Path(__file__).parent.parent)
