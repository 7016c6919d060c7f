"""Native code: Numba's functions as machine code, on disk, in XLA's programs, with no Python in it.

A toolchain that kernels and `vn.numba` share, and that knows of neither. What is compiled already
is loaded with LLVM alone: the modules from `memory` on import Numba, and are imported only as
something is compiled.

    cache           object files on disk, named after all that they depend on; the lock of compiling
    machine_code    the CPU that is compiled for, and object files loaded into this process
    ffi_header      XLA's C header: where the members of its structs are

    isa             which vector instructions it has, and how many numbers they take
    memory          memory by address, as C has it
    functions       Numba functions without Python, called as C's are
    object_file     object files of such functions
    call_frame      a call from XLA: its buffers, its errors, its threads
    threads         the parts of a job, on all threads of XLA's
    simd            vectors in registers, as values of Numba's
"""
