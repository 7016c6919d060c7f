"""Run code that is written for other libraries, and read and write checkpoints.

Each module imports its library when it is first used. For users:

    quax             the names of Quax, for code that is written for it
    qwix             the operations of Qwix, with its names and arguments
    jaximus          the names of eformer's jaximus, for code that is written for it
    pytensor         PyTensor graphs as JAX functions, and their products with quantized matrices

Files:

    safetensors      `vn.save` and `vn.load`
    structure        the structure of a saved tree, and how to restore it
    manifest         `veneer.json`: how each tensor of a saved folder is stored
    checkpoints      checkpoints that other libraries quantized
    folder           files and folders of named tensors, read one at a time and written in shards
    new_folder       folders that appear when they are complete, and their files besides weights
    shards           the safetensors files of a folder, and their index
    tensor_file      reads one safetensors file, and checks its header
    inspect          lists the tensors of a file or a folder

Parts of `pytensor`:

    pytensor_ops     JAX implementations of PyTensor operations that its JAX mode does not have
    pytensor_sparse  sparse matrices of PyTensor as `BCOO`
"""
