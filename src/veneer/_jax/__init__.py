"""The seam to private JAX: the only room that imports `jax._src`.

What is public is taken from its public place, but for jax.extend.core: importing that imports
Pallas, which takes as long as all of our modules. A shim names the version it is for, so that it
can be deleted.

    tracing             which trace is current, and what one knows of the arrays in it
    tangents            scopes around the tangents that JAX computes
    divisors            what divides an integer that a program computes
    primitives          primitives by name, the jaxprs that some contain, and the starts of slices
    custom_functions    functions with derivatives, solvers or batching rules of their own
    sparse              what the primitives of `jax.experimental.sparse` compute
    sharding            shardings, and the trees that functions of a shard_map return
    source_lines        the user's place in the program
    caller_errors       notes on errors of JAX for implicit arrays outside `implicit`
    export              the classes of values, as jax.export writes them
    hijax               what high types are built on; imported only where they are used
"""
