"""Bridges to other libraries and to files; each imports what it needs when it is first used.

shards           safetensors files of a folder, and their index
tensor_file      one safetensors file: its header checked, its tensors read
safetensors      trees of arrays in safetensors files: `save` and `load`
structure        how the tensors of a saved tree nest, and its tree made again
checkpoints      what other libraries quantised: a module for each family of folders
folder           files and folders of named tensors, read one at a time and written in shards
new_folder       folders that are there whole or not at all, and what is in one besides weights
manifest         `veneer.json`: how each tensor of a saved folder is stored
inspect          what a file or folder holds, tensor by tensor
quax             the names of Quax, for code that is written for it
qwix             the operations of Qwix, by its names and arguments
jaximus          the names of eformer's jaximus, for code that is written for it
pytensor         PyTensor graphs as JAX functions, and products with quantised matrices in them
pytensor_ops     implementations in JAX of PyTensor operations that its JAX mode lacks
pytensor_sparse  sparse matrices of PyTensor as `BCOO`
"""
