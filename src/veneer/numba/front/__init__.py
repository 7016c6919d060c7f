"""The front end: a function of JAX as a graph, and the trees of what it takes and returns.

graph           a jaxpr as a flat list of equations
keys            typed keys of random numbers as numbers of 64 bits
trees           functions of trees, written for one structure
"""
