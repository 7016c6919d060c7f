"""From dense arrays to QArrays.

The modules:

    calibration     calibration methods: from the values of a tile to a range
    compute         computing scales and codes: at once, in chunks, or by a CPU kernel
    quantize        quantize, quantize_with_scale, dequantize, and static ranges
"""
