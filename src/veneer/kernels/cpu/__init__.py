"""Kernels for the CPU: Numba functions that XLA calls.

`veneer.native` has the compiler toolchain, and the instructions of each CPU.

    build           compile kernels at first use, and register them as FFI targets
    handlers        turn a call from XLA into jobs, whose parts threads compute
    job             jobs: the addresses and sizes of products
    decoding        decode codes and numbers of small formats to f32
    scales          read scales and minima, and add the term of minima
    quantize        the kernel that quantizes f32

    floats          kernels that multiply f32 and bf16 activations
    integers        kernels that multiply int8 activations

The table in `common/table.py` names the modules of `floats` and `integers`. No module here imports
them otherwise.
"""
