"""The core: implicit values, rules, and the transform that runs them.

It knows no concrete type, and its modules import in one direction: jax_internals, explain, value,
rules, custom_derivatives, trace, transform, then higher_order and operators, which complete it.
"""

from pathlib import Path

from . import higher_order, jax_internals, operators

__all__ = ["higher_order", "operators"]

jax_internals.hide_frames_of(Path(__file__).parent.parent)
