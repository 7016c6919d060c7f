"""Quantized arrays that programs write into, such as key-value caches.

qcache       QCache, a QArray that programs write into
block_cache  BlockCache, a cache in which blocks of tokens share scales
zeros        zeros: new arrays of type QCache or BlockCache
"""
