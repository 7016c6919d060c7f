"""Code generation: a graph as source, of loop nests and of a function that calls them.

From what is imported to what imports it:

    index           indices as sums of loop variables
    storage         dtypes: how an entry is kept in memory, and what it is computed in
    arrays          arrays in memory, and arrays that are computed where they are read
    loop_nest       loops over buffers, as the source of a function: a kernel
    program         statements, where their memory is, and the finished source
    calls           calls from a program to functions at addresses
    fallback        primitives that have no rule, run by JAX
    njit_rules      rules that return an ordinary Numba function
    builder         what rules are given: it makes kernels, and the program that calls them
    assignment      many arrays written at once, where the new ones read the old
"""
