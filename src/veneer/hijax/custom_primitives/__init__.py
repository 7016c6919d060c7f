"""High primitives of a user's own, by `vn.hijax.primitive`: one equation until it is lowered.

    primitive       the decorator, and a call of a primitive
    derivatives     derivatives and transposes by the rules that a user sets
    vmap_rule       maps by the rule that a user sets
    expansion       what a primitive expands to, as an operation on flat operands
    mapped          operations mapped where there is no rule for it

Each imports those below it alone.
"""

from .primitive import primitive as primitive
