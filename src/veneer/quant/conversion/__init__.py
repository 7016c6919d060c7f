"""From dense arrays to QArrays.

The modules:

    scale_axes      tile sizes, and the axes along which values share a scale
    calibration     calibration methods: from the values of a tile to a range
    scales          from ranges to stored scales
    compute         computing codes and scales: in chunks, or by a CPU kernel
    quantize        quantize, quantize_with_scale, dequantize
    fake_quantize   fake_quantize, fake_quantize_with_scale: with a derivative
    ranges          calibration_range, scale_of_range: for static ranges
    sparsity        masks that keep n of each m weights
"""
