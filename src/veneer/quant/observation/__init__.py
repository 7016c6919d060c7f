"""Statistics of the activations of a model, recorded while the model runs.

The modules here:

    observed_weight  the weight that records its activations, and its rules for products
    recording        the sums of one weight: Recording on the host, Totals in a Box
    statistics       ActivationStatistics, their files, and the static scales they give
"""
