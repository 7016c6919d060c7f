"""Multiply activations by packed weights on TPUs, with an experimental kernel.

The kernel has never run on a TPU. It is used only with `VENEER_KERNELS=experimental`.

    matmul          check a product, arrange its operands, and call the kernel
    kernel          the kernel, in Pallas
"""
