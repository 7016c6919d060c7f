"""A toolchain that compiles functions to machine code with Numba and runs them without Python.

Kernels and `vn.numba` share it. LLVM alone loads code that is compiled already. The modules from
`memory` on import Numba, and are imported only when code is compiled.

    cache           object files on disk, and the lock of compilation
    machine_code    the CPU that code is compiled for, and object files in this process
    ffi_header      offsets of struct members from XLA's C header
    isa             the vector instruction set, and the size of its vectors

    memory          loads, stores and atomics at addresses
    functions       compilation of functions without Python, and calls of C functions
    object_file     object files of such functions
    call_frame      the call of an FFI handler by XLA: buffers, errors, threads
    threads         the parts of a job on all threads of XLA's pool
    simd            vector instructions on blocks of registers
"""
