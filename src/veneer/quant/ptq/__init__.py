"""Post-training quantization: round weights according to their activations on sample data.

The modules here:

    calibrate       `calibrate`: quantize the parameters of a model
    allocate_bits   `allocate_bits`: choose a format for each weight within a budget of bits
    tune            `tune`: train the scales and codes of a quantized model
    tuned_tree      `TunedTree`, a tree with trained codes, scales and dense arrays
    saved_progress  `SavedProgress`, a folder of results from which a calibration can be resumed
    weight          `RoundedWeight`, a weight that is rounded according to its activations
    matrices        a weight as a stack of matrices, and its low-rank correction
    gptq            GPTQ, which chooses the codes of a matrix row by row
    moments         losses, AWQ and SmoothQuant factors, from second moments of activations
    report          tables of the errors and formats of weights
"""
