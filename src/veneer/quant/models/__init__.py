"""Quantize models: choose the format of each parameter by rules on paths.

The modules here:

    rules           Rule: the formats of the parameters whose paths match a regex
    arguments       the model, the parameters, the batches and the rules that a caller passes
    uses            find_uses: the axes of each weight that products contract; the default rules
    quantize_tree   quantize_tree, and choose_rules for calibrate and allocate_bits
    notices         the warnings of quantize_tree
    correction      low-rank corrections of the rounding error
    observe         observe: record statistics of the activations of a model
    activation_products  quantize_products: quantize products of two activations
    checkpoint      quantize the tensors of a checkpoint, one after the other
"""
