"""The API that users subclass and call, on top of the core and its rules for primitives.

array             ImplicitArray, the class that users subclass
operators         its operators and methods, like those in `jax.Array`
shown             the display of values: in a line, in a notebook, by treescope
implicit          implicit: the transformation with filters, policies and captured arrays
captures          implicit arrays that a function captures, turned into arguments
operands          implicit arrays that JAX functions get as operands
straight_through  `ste`: run a function with the derivative of the identity
arguments         checks of arguments that several public functions take
"""
