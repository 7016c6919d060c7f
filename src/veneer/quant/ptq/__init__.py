"""Post-training quantisation: weights rounded by the activations that they meet.

The modules here:

    moments         second moments of activations, and what a weight's outputs lose
    gptq            codes of a matrix, one row after the other, each making up for those before
"""
