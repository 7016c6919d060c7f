"""Code generation: from a JAX function to Python source that Numba can compile.

The source of a program has a function per *kernel*, which is loops over arrays in memory, and a
last function that calls the kernels. Each module imports only modules above it:

    graph           traces a JAX function to a flat list of equations
    registry        `funcify` and `perform`: the registries of rules. Runs graphs with NumPy rules
    storage         how entries of each dtype are stored and computed
    arrays          the arrays of a program, in memory or lazy, and indices of their entries
    loop_nest       the loops of a kernel
    program         the function that calls the kernels, its memory, and the finished source
    calls           calls to functions at addresses, and primitives that JAX runs
    njit_functions  calls to and from Numba functions of users. It imports Numba
    builder         runs the rules of the equations, and collects kernels and calls
"""
