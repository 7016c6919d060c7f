"""From dense arrays to QArrays.

The modules here:

    quantize        quantize, quantize_with_scale, dequantize
    fake_quantize   what an array is worth once quantised, with a derivative
    scale_axes      which values share a scale, by the axes that a product contracts
    calibration     from the values of a tile to the range that its codes cover: the methods
    ranges          ranges on their own, as they are recorded and kept
    scales          scales as they are stored
    sparsity        which weights of each group are kept
    chunks          tiles, a few at a time
    cpu_kernel      quantising by a kernel for CPUs
"""
