"""The core: implicit values, rules, and the trace that runs them. It knows no concrete type.

The modules here are the core. Each imports only modules above it, and `_jax`:

    tree              classes as dataclasses and pytrees
    errors            errors for mistakes in types, rules and calls, with the remedy
    policy            Event, a record of a primitive that ran on an implicit operand, and the
                      reaction to it: allow, warn, raise, collect
    leaf_axes         LeafAxis: how the axes of leaves correspond to dense axes
    value             Value, the base class of implicit arrays, and materialise
    sources           the weights that a value comes from, for reports
    rules             register, and the selection of a rule by operand types
    dispatch          run a primitive by a rule, a default, or materialization
    nesting           nested calls of implicit, and values that programs build
    trace             the trace, which wraps implicit values only, and redispatch, which runs a
                      function with the rules in force

The packages, which import the core:

    primitives        the rules of JAX's own primitives that serve all implicit types
    surface           the public API: ImplicitArray, implicit, ste
"""

from pathlib import Path

from .._jax.frames import hide_frames_of
from . import primitives as primitives

hide_frames_of(Path(__file__).parent.parent)
