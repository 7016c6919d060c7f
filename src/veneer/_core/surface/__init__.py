"""Where Python meets the heart: operators of arrays, and the variables that a function captures.

operators   the operators and methods of `jax.Array`, as `implicit` of them
captures    what a function closes over, opened so that it is as an argument
"""
