"""High primitives of a user's own, by `vn.hijax.primitive`: one equation until it is lowered.

The modules, each of which imports those above it alone:

    mapped          operations mapped where there is no rule for it
    expansion       what a primitive expands to, as an operation on flat operands
    derivatives     derivatives and transposes by the rules that a user sets
    vmap_rule       maps by the rule that a user sets
    primitive       the decorator, and a call of a primitive
"""

from .primitive import primitive as primitive
