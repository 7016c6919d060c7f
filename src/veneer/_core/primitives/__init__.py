"""Rules of JAX's own primitives for implicit values of all types. Import it to register them.

Rules of primitives that contain programs:

    programs            jit, jax.checkpoint, branches and loops
    custom_functions    custom_jvp, custom_vjp, custom_vmap, linear_call, custom_root, ...
    sharding            shard_map, sharding constraints and transfers, and specs for leaves

Rules of other primitives:

    passthrough         primitives that return their operand, callbacks and debug prints
    movement            primitives that move elements: transpose, slice, gather, ...
    writing             updates of slices, scatter; the update is stored in the format of the value
    collectives         primitives that send elements to other devices

Tools for rules:

    staging             programs traced again on the leaves of implicit operands
    scopes              the place in a program where a primitive is bound
    leaves              labels, leaf layouts, and primitives that move elements in each leaf
    axes                the axes of reshapes and products
"""

from . import collectives as collectives
from . import custom_functions as custom_functions
from . import movement as movement
from . import passthrough as passthrough
from . import programs as programs
from . import sharding as sharding
from . import writing as writing
