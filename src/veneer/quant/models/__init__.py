"""Models: which of their parameters take which format.

The modules here:

    rules           Rule and quantize_tree: parameters by their paths
    selection       tensors of a checkpoint by their names, before any work is done
    checkpoint      a checkpoint quantised, one tensor after the other
"""
