"""Post-training quantisation: weights rounded by the activations that they meet.

The modules here:

    calibrate       the parameters of a model, by one of these methods
    weight          a weight that is being rounded: one matrix, or a stack of them
    report          what weights lost, as a table
    moments         second moments of activations, and what a weight's outputs lose
    gptq            codes of a matrix, one row after the other, each making up for those before
"""
