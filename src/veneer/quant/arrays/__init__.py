"""QArray, the quantized array.

qarray  QArray: codes, scales and zero points
pairs   decoding two neighboring values at once, which is faster on GPUs
"""
