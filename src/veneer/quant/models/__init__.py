"""Models: which of their parameters take which format.

The modules here:

    rules           Rule: parameters by their paths
    methods         the names of methods of post-training quantization
    observe         observe: statistics of the activations of a model
    activation_products  quantize_products: products of two activations
    quantize_tree   the parameters of a tree, by rules
    correction      corrections of low rank of what rounding lost
    notices         what that tells of: dense weights, other tiles, large results
    uses            which axes of its weights the products of a program contract
    usual_rules     what is usually done with the weights of a language model
    selection       tensors of a checkpoint by their names, before any work is done
    checkpoint      a checkpoint quantised, one tensor after the other
"""
