"""`veneer demo`: a real sentence encoder, quantised and run unchanged.

    run         the demo from beginning to end
    fetch       all-MiniLM-L6-v2 as data, into a cache
    model       a Hugging Face BERT folder, and the program that runs it
    sentences   512 English sentences
    measure     bytes, fidelity and milliseconds of each variant
    picture     size against fidelity

The program itself, `examples/sentence_encoder.py`, does not import veneer.
"""

from importlib.util import find_spec

_needed = ("matplotlib", "platformdirs", "rich", "safetensors", "tokenizers")
if _missing := [name for name in _needed if find_spec(name) is None]:
    raise ImportError(f"The demo needs {', '.join(_missing)}: pip install 'veneer[demo]'.")
