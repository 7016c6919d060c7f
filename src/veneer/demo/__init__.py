"""`veneer demo`: a sentence encoder and a language model, packed and run unchanged.

run             the first act: a sentence encoder
talk            the second act: a language model
fetch           models and a text as data, into a cache
programs        the programs of `examples/`, which do not import veneer
calibrated      weights of a checkpoint, rounded by a text
model           a Hugging Face BERT folder, and the program that runs it
language_model  a GGUF file, and the program that runs it
sentences       English sentences
measure         bytes, fidelity and milliseconds of each variant of the encoder
picture         size against fidelity
"""

from importlib.util import find_spec

from .._core.errors import install_command

_needed = ("jinja2", "matplotlib", "platformdirs", "rich", "tokenizers")
if _missing := [name for name in _needed if find_spec(name) is None]:
    raise ImportError(f"the demo needs {', '.join(_missing)}: {install_command('demo')}")
