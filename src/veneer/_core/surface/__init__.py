"""Where Python meets the heart: what users subclass, annotate and capture.

array           ImplicitArray, what users subclass
operators       its operators and methods, those of `jax.Array`
annotations     those of a rule, as the classes of operands that it takes
mistakes        those in a type or a rule, told by the names that its author gave
captures        what a function closes over, opened so that it is as an argument
"""
