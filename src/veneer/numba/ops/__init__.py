"""The rules of vn.numba, a family of primitives a file."""

from . import argmax as argmax
from . import bitcast as bitcast
from . import complex as complex
from . import control_flow as control_flow
from . import convolution as convolution
from . import cumulative as cumulative
from . import decompositions as decompositions
from . import elementwise as elementwise
from . import elementwise_references as elementwise_references
from . import indexing as indexing
from . import layout as layout
from . import linear_systems as linear_systems
from . import products as products
from . import random as random
from . import reduce as reduce
from . import reductions as reductions
from . import scatter as scatter
from . import sorting as sorting
from . import special as special
from . import windows as windows
