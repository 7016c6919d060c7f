"""Multiply activations by packed weights on NVIDIA GPUs.

matmul          compile and call the kernel for few rows
matmul_config   choose the block sizes and the macros of the kernel for few rows
matmul.cu       the kernel for few rows, in CUDA C++
nvrtc           compile CUDA C++ to PTX
hopper          check and call the kernel for many rows, on Hopper GPUs
hopper_config   select the block sizes of the kernel for many rows
hopper_kernel   the kernel for many rows, in Pallas Mosaic GPU
"""
