"""`Box`: a place that programs read and write, under all of JAX's transformations.

box         Box, and what stands for one where it is taken apart
contents    what a Box holds, and how programs read and write it
view        contents of a Box that is an argument: references of another's
frames      the traces of `vn.jit` that are open, in which contents may change their structure
traces      what is asked of JAX's traces
"""

from .box import Box as Box
