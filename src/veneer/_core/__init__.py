"""The core: implicit values, rules, and the transform that runs them.

It knows no concrete type, and its modules import in one direction. Of values: jax_internals, tree,
explain, value, labels, batch_axes. Of rules: rules, results. The transform: closures, reentry,
custom_derivatives, sharding, shard_map, trace, transform; staging, for programs inside primitives;
operators and array for the class that users see. The modules imported below complete it with the
rules of primitives that contain programs, call the host, or give back what they are given.
"""

from pathlib import Path

from . import callbacks as callbacks
from . import calls as calls
from . import control_flow as control_flow
from . import custom_calls as custom_calls
from . import hi_primitives as hi_primitives
from . import identities as identities
from . import jax_internals
from . import linear_solve as linear_solve

jax_internals.hide_frames_of(Path(__file__).parent.parent)
