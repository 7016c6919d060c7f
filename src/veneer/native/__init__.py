"""A toolchain that compiles functions to machine code with Numba and runs them without Python.

Kernels and `vn.numba` share it. LLVM alone loads code that is compiled already. The modules from
`memory` on import Numba, and are imported only when code is compiled.

    cache           object files on disk, and the lock of compilation
    machine_code    the CPU that code is compiled for, and object files in this process
    ffi_header      offsets of struct members from XLA's C header

    memory          loads, stores and atomics at addresses
    functions       functions without Python objects, and object files of such functions
    xla_calls       a call from XLA: its buffers, its errors, and work on XLA's threads
    simd            the instruction set of this process, and its vector instructions
"""
