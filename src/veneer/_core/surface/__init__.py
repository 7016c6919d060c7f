"""Where Python meets the heart: what users subclass, annotate and capture.

array           ImplicitArray, what users subclass
operators       its operators and methods, those of `jax.Array`
annotations     those of a rule, as the classes of operands that it takes
event           what users are told: events, the error and the warning
functions       jitted functions that have rules, as primitives do
fields          the fields of a type that hold an array, by their annotations
parts           values that stand for no array, refused
operands        values as operands of JAX's functions where nobody has wrapped them
nesting         calls of implicit within others, and arrays that programs build
mistakes        those in a type or a rule, told by the names that its author gave
shown           how values are shown: in a line, in a notebook, by treescope
weights         which implicit arrays are weights, and their paths
found           weights that no argument holds, told by what their leaves are
straight_through  `ste`: run a function with the derivative of the identity
captures        what a function closes over, opened so that it is as an argument
"""
