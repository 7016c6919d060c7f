"""Products on NVIDIA GPUs that read codes as they are stored.

matmul          which kernel computes a product of few rows, and its call
matmul.cu       that kernel, in CUDA C++
nvrtc           from CUDA C++ to PTX, by the compiler that `jax[cuda]` installs
hopper          which products of many rows a kernel for Hopper GPUs computes, and its call
hopper_config   its block sizes, and which products they fit
hopper_kernel   that kernel, in Pallas Mosaic GPU
"""
