"""Multiply activations by packed weights on NVIDIA GPUs.

matmul          check products, and call the kernel for few rows
cuda_program    choose the block sizes of the kernel for few rows, and compile it
matmul.cu       the kernel for few rows, in CUDA C++
hopper          check products, and call the kernel for many rows, on Hopper GPUs
hopper_kernel   the kernel for many rows, in Pallas Mosaic GPU
"""
