"""The front end: a function of JAX as a graph, and the trees of what it takes and returns.

Each imports those above it, or none:

    keys            typed keys of random numbers as numbers of 64 bits
    graph           a function, or its jaxpr, as a flat list of equations
    trees           functions of trees, written for one structure
"""
