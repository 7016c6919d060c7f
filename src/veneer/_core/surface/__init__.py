"""The API that users subclass and call, on top of the core and its rules for primitives.

array             ImplicitArray, the class that users subclass, and its display
operators         its operators and methods, like those in `jax.Array`
implicit          implicit: the transformation with filters, policies and captured arrays
operands          implicit arrays that JAX functions get although `implicit` did not wrap them
straight_through  `ste`: run a function with the derivative of the identity
arguments         checks of arguments that several public functions take
"""
