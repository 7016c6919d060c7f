"""Statistics of the activations of a model.

recording   ObservedWeight, a weight that records the activations that multiply it, and Recording
statistics  ActivationStatistics, their files, and static scales
"""
