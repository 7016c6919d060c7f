"""Checkpoints that others quantised, read packed, and written so that others read them.

    opened              a checkpoint opened by what is there: `open_checkpoint`
    families            the table of families of Hugging Face folders, and which a folder is of
    writing             folders written as others have them: `write_folder`
    source              the stored tensors that a family looks at, and the weights that it makes
    gguf                files of llama.cpp

A module for each family, which says which tensors make a weight, and how:

    gptq                GPTQ, of 2, 3, 4 and 8 bits
    awq                 AWQ
    compressed_tensors  compressed-tensors: integers and floats, of several layouts
    block_fp8           floats of 8 bits under scales of blocks
    bitsandbytes        bitsandbytes: nf4, fp4, int8
    mxfp4               MXFP4, as gpt-oss has it
    mlx                 MLX
    torchao             torchao's tensors: int4, int8, float8 and others in int8

and what they have in common:

    affine              integers under scales and zero points, and back
    codes               codes as others pack them, and as `QArray` does
    packing             codes packed as `QArray` does, in NumPy
    tiling              tiles of others, as those of a `QArray`
"""
