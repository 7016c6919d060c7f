"""The core: implicit values, rules, and the trace that runs the rules. It names no array type.

An implicit value is a pytree that represents a dense array. A rule implements a JAX primitive for
operands of given types.

The modules here are the core. Each imports only modules above it, and `_jax`:

    tree              makes each class of implicit values a frozen dataclass and a pytree
    errors            errors for mistakes in types, rules and calls, with the remedy
    policy            Event, a record of a primitive that ran on an implicit operand, and the
                      reaction to an event: allow, warn, raise, collect
    leaf_axes         LeafAxis: how the axes of stored leaves correspond to axes of the dense array
    value             Value, the base class of implicit arrays, and materialise
    sources           the weights that a value comes from, for reports
    rules             register, and the selection of a rule by operand types
    dispatch          run a primitive by a rule, by the method `default` of an operand's class, or
                      on materialized operands
    nesting           nested calls of implicit, and implicit values that programs build
    trace             the trace, whose tracers hold implicit values, and redispatch, which calls a
                      function so that its primitives run by the rules of implicit arguments

The packages, which import the core:

    primitives        the rules of JAX's own primitives that serve all implicit types
    surface           the public API: ImplicitArray, implicit, ste
"""

from pathlib import Path

from .._jax.frames import hide_frames_of
from . import primitives as primitives

hide_frames_of(Path(__file__).parent.parent)
