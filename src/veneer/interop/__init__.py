"""Drop-in modules with the names of other libraries.

Each module imports its library when it is first used.

    quax             the names of Quax, for code that is written for it
    qwix             the operations of Qwix, with its names and arguments
    jaximus          the names of eformer's jaximus, for code that is written for it
    pytensor         PyTensor graphs as JAX functions, and their products with quantized matrices
    checkpoints      the earlier name of `veneer.files.gguf`

Parts of `pytensor`:

    pytensor_graph   a graph in JAX: rewrites, declared dtypes, and checks of arguments
    pytensor_quantized_dot  the `Op` of a product with a quantized matrix
    pytensor_ops     JAX implementations of PyTensor operations that its JAX mode does not have
    pytensor_sparse  sparse matrices of PyTensor as `BCOO`
"""
