"""The earlier name of `veneer.files.gguf`. It stays importable as a module."""

import sys

from ..files import gguf

__all__ = ["gguf"]

# The import system finds a submodule of this module, which is not a package, only in `sys.modules`.
sys.modules[f"{__name__}.gguf"] = gguf
