"""Multiply activations by packed weights on TPUs, with an experimental kernel.

The kernel has never run on a TPU. It is used only with `VENEER_KERNELS=experimental`.

    matmul          check and call the kernel
    layout          sizes and blocks of a product
    kernel          the kernel, in Pallas
    decode          decode codes within the kernel
"""
