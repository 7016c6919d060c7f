"""Kernels in Pallas: products of floats with codes on a GPU, and on a TPU.

They are used only where that is asked for, for they were not measured.

    call        a product by a kernel, and whether there is one
    layout      a product in entries of what is stored
    decode      bytes become numbers
    gpu         the kernel that Triton compiles
    tpu         the kernel that Mosaic compiles
"""
