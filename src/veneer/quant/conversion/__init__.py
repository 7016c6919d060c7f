"""From dense arrays to QArrays.

The modules:

    scale_axes      tile sizes, and the axes along which values share a scale
    calibration     calibration methods: from the values of a tile to a range
    compute         computing scales and codes: at once, in chunks, or by a CPU kernel
    quantize        quantize, quantize_with_scale, dequantize, and static ranges
    fake_quantize   fake_quantize, fake_quantize_with_scale: with a derivative
    sparsity        masks that keep n of each m weights
"""
