"""What the activations of a model are, as it runs.

The modules here:

    observed        a weight that records its activations
    recording       what the host keeps of the activations of a weight
    totals          what a Box keeps of them
    statistics      ActivationStatistics, what comes of it, and the static ranges that follow
"""
