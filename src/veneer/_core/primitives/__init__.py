"""What happens to values of any type at JAX's own primitives; imported for what it registers.

Primitives that contain programs:

    staging             those programs, traced anew with the rules in force, on leaves
    reentering          functions that JAX runs later, in a trace of its own
    scopes              where in a program a primitive is, for who asks
    calls               programs that are called once: jit, remat
    control_flow        loops and branches
    custom_calls        closed calls, and those for a transformation, a backend or a memory
    custom_derivatives  custom_jvp and custom_vjp
    linear_solve        custom_linear_solve
    hi_primitives       those that JAX defines as high ones
    shard_map           programs on blocks

and others:

    callbacks           those that call the host
    identities          those that return their operand
    packing             the one of ours that makes a value of its leaves
    movement            those that move entries about: transpose, slice, gather, ...
    writing             those that write into a value, and store what is written as it is
    sharding            those that place an array on devices
    collectives         those that send entries to other devices

and what rules are written with:

    batch_axes          leading axes that every leaf has, found for types without `leaf_axes`
    labels              types whose one leaf is the dense array itself
    leaf_by_leaf        what moves entries about, done to each leaf by the axes that it follows
    reshaping           the shapes of leaves in blocks, when the dense array is reshaped
    dimension_numbers   which axes of two operands a product sums, and which both have
"""

from . import callbacks as callbacks
from . import calls as calls
from . import collectives as collectives
from . import control_flow as control_flow
from . import custom_calls as custom_calls
from . import custom_derivatives as custom_derivatives
from . import hi_primitives as hi_primitives
from . import identities as identities
from . import linear_solve as linear_solve
from . import movement as movement
from . import packing as packing
from . import shard_map as shard_map
from . import sharding as sharding
from . import writing as writing
