"""Models: which of their parameters take which format.

The modules here:

    rules           Rule: parameters by their paths
    quantize_tree   the parameters of a tree, by rules
    correction      corrections of low rank of what rounding lost
    notices         what that tells of: dense weights, other tiles, large results
    uses            which axes of its weights the products of a program contract
    usual_rules     what is usually done with the weights of a language model
    selection       tensors of a checkpoint by their names, before any work is done
    checkpoint      a checkpoint quantised, one tensor after the other
"""
