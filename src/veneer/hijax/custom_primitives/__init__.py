"""Primitives that users define by `vn.hijax.primitive`. Jaxprs show each call as one equation.

The modules. Each imports only modules above it:

    expansion       the user's functions as operations, and their mapped forms
    derivatives     derivatives and transposes, by the rules that a user sets
    primitive       the decorator, a call of a primitive, and the user's rule for `jax.vmap`
"""

from .primitive import primitive as primitive
