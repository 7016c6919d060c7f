"""GGUF files, llama.cpp's: read packed, and written.

The modules here:

    file        GgufFile: the tensors of a file, or of one in several parts
    container   what stands before the tensors: their names, types and places
    metadata    the typed values beside them
    blocks      the types of blocks: where codes, scales and minima lie. A row each
    tensors     from blocks to a QArray, and back
    names       Hugging Face's names, and the order of rows there
    config      what config.json says, of metadata
    tokenizer   the tokenizer that metadata describes
    writing     write_gguf: a file, whole or not at all
"""

from .config import huggingface_config as huggingface_config
from .file import GgufFile as GgufFile
from .tokenizer import tokenizer as tokenizer
from .tokenizer import tokenizer_files as tokenizer_files
from .writing import write_gguf as write_gguf
