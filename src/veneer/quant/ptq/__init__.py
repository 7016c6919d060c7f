"""Post-training quantization: round weights according to their activations on sample data.

The modules here:

    calibrate       `calibrate`: quantize the parameters of a model
    allocate_bits   `allocate_bits`: choose a format for each weight within a budget of bits
    tune            `tune`: train the scales and codes of a quantized model
    saved_progress  `SavedProgress`, a folder of results from which a calibration can be resumed
    weight          `RoundedWeight`, a stack of matrices that are rounded and corrected
    gptq            the mathematics of a matrix: second moments, factors, GPTQ
    report          tables of the errors and formats of weights
"""
