"""Experimental products on TPUs that read codes as they are stored.

They have run on no TPU, so they are used only if `VENEER_KERNELS=experimental` says so.

    matmul          which products the kernel computes, and its call
    layout          a product in entries of the stored matrix, cut into blocks
    kernel          the kernel, in Pallas
    decode          from codes to numbers, within the kernel
"""
