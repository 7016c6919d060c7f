"""QArray, the quantized array.

qarray  QArray: codes, scales and zero points
checks  checks of the fields of a QArray
pairs   decoding two neighboring values at once, which is faster on GPUs
"""
