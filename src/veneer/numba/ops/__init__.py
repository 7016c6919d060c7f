"""The rules of vn.numba, a family of primitives a file.

Each has what its primitives are in native code, and what they are in NumPy:

    elementwise     an entry of the result is computed of one entry of each operand
    elementwise_references  what those primitives are in NumPy
    bitcast         entries taken for those of another dtype, and rounded to fewer bits
    special         special functions, by their definitions in JAX or XLA
    random          random bits, as threefry2x32 has them
    movement        entries moved, or repeated
    indexing        slices and gathers at computed places
    scatter         entries at computed places replaced, added to and so on
    sorting         sorting, and the greatest entries
    combine         two entries as one: steps of reductions, running totals, windows and scatters
    reductions      sums, extremes and any function over axes, and where extremes are
    cumulative      sums and the like of all entries up to each
    windows         reductions under a window that moves over an array
    fourier         Fourier transforms
    linear_algebra  products, convolutions, decompositions
    control_flow    scan, while, cond, and calls whose derivatives are known
"""

from . import bitcast as bitcast
from . import control_flow as control_flow
from . import cumulative as cumulative
from . import elementwise as elementwise
from . import elementwise_references as elementwise_references
from . import fourier as fourier
from . import indexing as indexing
from . import movement as movement
from . import random as random
from . import reductions as reductions
from . import scatter as scatter
from . import sorting as sorting
from . import special as special
from . import windows as windows
from .linear_algebra import convolution as convolution
from .linear_algebra import decompositions as decompositions
from .linear_algebra import linear_systems as linear_systems
from .linear_algebra import products as products
from .linear_algebra import sparse as sparse
