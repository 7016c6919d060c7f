"""Files of tensors: `vn.save`, `vn.load`, and the checkpoints of other libraries.

Trees of arrays:

    load_save           `vn.save` and `vn.load`
    tree_encoding       the structure of a tree as JSON
    tree_decoding       a tree from this JSON, alone or into the classes of another tree
    checkpoint          opens, inspects and converts a checkpoint of any kind

Folders of safetensors files:

    folder              the named tensors of a file or a folder, read one at a time
    manifest            `veneer.json`: how each tensor of a saved folder is stored
    new_folder          folders that appear at `path` only when they are complete
    tensor_file         safetensors files: a checked reader, and a writer of shards

Folders that other libraries quantized, with one module per family:

    families            the table of families: reads and writes folders
    stored_tensors      the stored tensors of a folder, as the families see them
    codes               codes, scales and zero points: between other libraries and a `QArray`
    gptq                GPTQ, with 2, 3, 4 and 8 bits
    awq                 AWQ
    compressed_tensors  compressed-tensors: integers and floats, in several layouts
    block_floats        FP8 with scales per block, and MXFP4 of gpt-oss
    bitsandbytes        bitsandbytes: nf4, fp4, int8
    mlx                 MLX
    torchao             torchao: int4, int8, float8, and narrower integers in int8
    targets             the formats that each library can hold, for new and converted weights

GGUF, the files of llama.cpp:

    gguf                `GgufFile` and `write_gguf`
    gguf_header         the metadata and the tensor descriptions at the start of a file
    gguf_blocks         the table of block types: where codes, scales and minima are
    gguf_tensors        blocks to a `QArray` and back
    gguf_huggingface    names and row order of Hugging Face, and `config.json`
    gguf_tokenizer      the tokenizer that the metadata describes
"""
