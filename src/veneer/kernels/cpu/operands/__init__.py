"""Read the operands of a product in a CPU kernel.

Float and integer kernels share these modules:

    job       the addresses and sizes of one product, in memory that all threads read
    codes     decode codes and small number formats to vectors of f32
    planes    unpack codes that are stored as bit planes
    scales    read scales and minima as f32
    minima    compute the term that minima add to a product
"""
