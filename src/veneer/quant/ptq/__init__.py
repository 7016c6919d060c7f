"""Post-training quantisation: weights rounded by the activations that they meet.

The modules here:

    calibrate       the parameters of a model, by one of these methods
    allocate_bits   which weight takes which of several formats, within a budget of bits
    allocation      choices for weights, of the least loss in so many bits
    tune            scales and codes, trained until outputs are the dense model's
    tuned_tree      what of a tree is trained, and how it is stored in the end
    kept            what was found so far, in a folder, from which the same calibration goes on
    weight          a weight that is being rounded: one matrix, or a stack of them
    report          what weights lost, as a table
    moments         second moments of activations, and what a weight's outputs lose
    factors         of channels, by which weights are multiplied and activations divided
    low_rank        corrections of low rank of what rounding lost
    gptq            codes of a matrix, one row after the other, each making up for those before
"""
