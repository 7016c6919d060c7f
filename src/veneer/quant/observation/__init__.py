"""Statistics of the activations of a model, recorded while the model runs.

The modules here:

    observed_weight  ObservedWeight, whose rules for products record the activations
    recording        sums and ranges of the activations of one weight, while the model runs
    statistics       ActivationStatistics, the files that hold them, and static scales
"""
