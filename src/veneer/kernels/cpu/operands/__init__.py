"""How CPU kernels read the operands of a product.

Float and integer kernels share these modules:

    job             the addresses and sizes of one product, in memory that all threads read
    codes           codes decoded to vectors of f32
    small_floats    floats of 8 and 16 bits as vectors of f32
    planes          codes in bit planes
    scales          scales and minima as f32
    minima          the part of a product that minima contribute
"""
