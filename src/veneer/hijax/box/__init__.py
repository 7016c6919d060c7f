"""`Box`: a place that programs read and write, under all of JAX's transformations.

The modules, each of which imports those above it alone:

    traces      what is asked of JAX's traces: in which others one runs, and what it stages
    frames      the traces of `vn.jit` that are open, in which contents may change their structure
    contents    what a Box holds, and how programs read and write it
    view        contents of a Box that is an argument: references of another's
    box         Box, and what stands for one where it is taken apart
"""

from .box import Box as Box
