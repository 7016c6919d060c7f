"""Kernels for the CPU: Numba functions that XLA calls.

`veneer.native` has the compiler toolchain, and the instructions of each CPU.

    build           register kernels as FFI targets, and compile them at first use
    targets         the names of all targets, and the object file of each
    handlers        turn a call from XLA into jobs, whose parts threads compute
    operands        read the operands of a product: addresses, codes, scales and minima
    floats          kernels for f32 and bf16 activations
    integers        kernels for int8 activations
    quantize        the kernel that quantizes f32
    quantize_simd   its vector instructions
"""
