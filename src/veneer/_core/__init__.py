"""The core: implicit values, rules, and the transform that runs them. It knows no concrete type.

The modules here are the heart, and what a newcomer reads, each importing those above it:

    tree            classes as pytrees, and flat lists of leaves
    policy          who is told what happens to implicit operands
    leaf_axes       which dense axis each axis of a leaf follows, and in blocks of what size
    value           Value, and materialise
    batch_axes      the leaf axes of a value: stated by its type, or those of a batch
    rules           which rule is for which operand types: multiple dispatch
    results         the check of what a rule returns
    dispatch        what a primitive gives: by a rule, a default, or made dense
    trace           the trace, which wraps implicit values and no others
    transform       implicit, and redispatch, by which rules of ours call functions of ours

and in rooms of their own:

    surface         Python's side: ImplicitArray, its operators, annotations, captured variables
    primitives      what values of any type do at JAX's own primitives
"""

from pathlib import Path

from .._jax.source_lines import hide_frames_of
from . import primitives as primitives

hide_frames_of(Path(__file__).parent.parent)
