"""Quantize models: choose the format of each parameter by rules on paths.

The modules here:

    rules           Rule, the format of the parameters that match a regex
    matching        matches rules with the leaves of a tree
    programs        the model that a caller passes: parameters, program and batches
    uses            find_uses: the axes of each weight that products contract
    default_rules   the default rules for language models
    quantize_tree   quantize_tree, and choose_rules for calibrate and allocate_bits
    notices         the warnings of quantize_tree
    correction      low-rank corrections of the rounding error
    observe         observe: statistics of the activations of a model
    activation_products  quantize_products: products of two activations
    checkpoint      quantizes the tensors of a checkpoint, one after the other
"""
