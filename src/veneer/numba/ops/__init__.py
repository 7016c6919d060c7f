"""The rules of vn.numba, by family of primitives.

A rule of `funcify` writes native code, and a rule of `perform` computes the same with NumPy:

    elementwise     arithmetic, comparisons, logic, bits and conversions
    special         functions of mathematics, and complex numbers
    random          random bits and keys
    movement        primitives that move, repeat or select entries
    indexing        dynamic slices, gather and scatter
    sorting         sort and top_k
    reductions      reductions, cumulative reductions, argmax
    windows         convolutions and pooling
    fourier         Fourier transforms
    products        dot_general, also of sparse arrays
    simd_products   products of float32 matrices in vector instructions
    lapack          LAPACK functions, and calls of them for stacks of matrices
    decompositions  matrix decompositions and linear systems
    control_flow    scan, while and cond
"""

from . import control_flow as control_flow
from . import decompositions as decompositions
from . import elementwise as elementwise
from . import fourier as fourier
from . import indexing as indexing
from . import movement as movement
from . import products as products
from . import random as random
from . import reductions as reductions
from . import sorting as sorting
from . import special as special
from . import windows as windows
