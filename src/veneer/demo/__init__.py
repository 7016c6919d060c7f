"""`veneer demo`: run a sentence encoder and a language model, dense and quantized.

fetch             download the models and a text, and import programs of `examples/`
encoder           a BERT sentence encoder from a Hugging Face folder
encoder_demo      the first part: formats of the encoder, a table, a picture and a search
language_model    the second part: a Llama from a GGUF file, an answer and a table
calibrated        `veneer quantize --calibrate`: run a model on a text, and round its weights
"""

from importlib.util import find_spec

from .._core.errors import install_command

_needed = ("jinja2", "matplotlib", "platformdirs", "rich", "tokenizers")
if _missing := [name for name in _needed if find_spec(name) is None]:
    raise ImportError(f"the demo needs {', '.join(_missing)}: {install_command('demo')}")
