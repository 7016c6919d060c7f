"""`LoraArray`, what JAX's primitives do on it, and functions of trees that hold some."""

from . import convolution as convolution
from . import dot_general as dot_general
from . import gather as gather
from . import layout as layout
from .adapters import join as join
from .adapters import merge as merge
from .adapters import split as split
from .adapters import with_dropout as with_dropout
from .adapters import without_dropout as without_dropout
from .array import LoraArray as LoraArray
