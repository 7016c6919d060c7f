"""The core: implicit values, rules, and the transform that runs them. It knows no concrete type.

Modules import those above them, and none below:

    jax_internals           private JAX, and the differences between its versions
    export, tree            classes as pytrees, and as jax.export writes them
    policy, tables, report  who is told of what, and the report
    value                   Value, materialise
    labels, batch_axes      what may be said of a type: its leaf is the array; an axis is a batch's
    functions               jitted functions of JAX's, in the place of primitives
    rules, results, dispatch
                            multiple dispatch, and the check of what a rule returns
    closures, reentering    functions that capture values, and functions that run later
    custom_derivatives, sharding, shard_map
                            what JAX hands to a trace as a function, or moves between devices
    trace, transform        the trace, and implicit
    explain, staging        the report of a function; programs inside primitives, traced anew
    operators, array        ImplicitArray, what users subclass

and the rules that hold for every type, imported below for what they register:

    calls, control_flow, custom_calls, linear_solve, hi_primitives
                            primitives that contain programs
    callbacks               those that call the host
    identities              those that return their operand
    leading_axes            those that move batch axes
"""

from pathlib import Path

from . import callbacks as callbacks
from . import calls as calls
from . import control_flow as control_flow
from . import custom_calls as custom_calls
from . import hi_primitives as hi_primitives
from . import identities as identities
from . import jax_internals
from . import leading_axes as leading_axes
from . import linear_solve as linear_solve

jax_internals.hide_frames_of(Path(__file__).parent.parent)
