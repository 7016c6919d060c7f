"""Products of arrays, and linear algebra by BLAS and LAPACK.

Rules, and what their code calls:

    products        dot_general with any dimension numbers
    convolution     convolutions, as products with windows
    decompositions  those that LAPACK has
    linear_systems  triangular and tridiagonal systems
    sparse          products with arrays of `jax.experimental.sparse`
    matrices        stacks of matrices as LAPACK takes them
    blas, lapack    functions of these libraries, as instructions
    simd_products   products of float32 in the CPU's vectors: an object file
"""
