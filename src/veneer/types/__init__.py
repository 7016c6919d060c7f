"""Array types that represent a dense array and store something cheaper.

    lora            weights with a LoRA adapter
    structured      matrices: diagonal, banded, triangular, low-rank, ...
    sparse          `SparseArray`, which stores the nonzero entries
    sparse_rules    the rules of JAX's primitives for `SparseArray`
    nm_sparse       `NMSparse`, which stores n of every m neighboring entries
    masked          `Masked`, with a mask of invalid entries
    named           `Named`, with axis names
    quantity        `Quantity`, with a unit of astropy or pint
    prng            `PRNGKey`, random keys stored as integers
    basis           arrays stored permuted or scaled along an axis: `Permuted`, `Scaled`
    rotated         `Rotated`, stored rotated by an orthogonal matrix, which spreads outliers
    constant        `Constant`, whose entries are all equal
    frozen          `Frozen`, which gets no gradient
    lazy            `Lazy`, which is computed when an operation needs it

Modules that several types use:

    elementwise     lists of elementwise primitives, and rules for primitives that map 0 to 0
    label           the base class of `Named` and `Quantity`
"""

from . import lora as lora
from . import sparse_rules as sparse_rules
from .basis import Permuted, Scaled
from .constant import Constant
from .frozen import Frozen
from .lazy import Lazy
from .lora import LoraArray
from .masked import Masked
from .named import Named
from .nm_sparse import NMSparse
from .prng import PRNGKey
from .quantity import Quantity
from .rotated import Rotated
from .sparse import SparseArray
from .structured import (
    Banded,
    BlockDiagonal,
    Circulant,
    Diagonal,
    Identity,
    Kronecker,
    LowRank,
    Permutation,
    Product,
    Symmetric,
    Toeplitz,
    Triangular,
    Tridiagonal,
)

__all__ = [
    "Banded",
    "BlockDiagonal",
    "Circulant",
    "Constant",
    "Diagonal",
    "Frozen",
    "Identity",
    "Kronecker",
    "Lazy",
    "LoraArray",
    "LowRank",
    "Masked",
    "NMSparse",
    "Named",
    "PRNGKey",
    "Permutation",
    "Permuted",
    "Product",
    "Quantity",
    "Rotated",
    "Scaled",
    "SparseArray",
    "Symmetric",
    "Toeplitz",
    "Triangular",
    "Tridiagonal",
]


def __dir__() -> list[str]:
    return __all__
