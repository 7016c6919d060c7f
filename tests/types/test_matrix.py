"""The types of the package in the matrix of transformations: a cell of each transformation."""

from support.matrix import TYPES, matrix
from transforms.matrix import (
    test_batching,
    test_boundaries,
    test_calls,
    test_control_flow,
    test_custom,
    test_derivatives,
)

ALL = {
    **test_calls.CELLS,
    **test_batching.CELLS,
    **test_control_flow.SCAN,
    **test_control_flow.LOOPS,
    **test_control_flow.BRANCHES,
    **test_custom.CELLS,
    **test_derivatives.BY_LEAVES,
    **test_derivatives.BY_THE_DENSE_ARRAY,
    **test_boundaries.CELLS,
}

CELLS = (
    *("eager", "jit of implicit", "implicit of jit of jit", "ahead of time", "captured by jit"),
    *("vmap of implicit", "implicit of vmap", "implicit of vmap of jit"),
    *("scan, constant", "scan, xs", "scan, carry", "scan, ys", "implicit of grad of scan"),
    *("while, carry", "implicit of grad of fori", "map"),
    *("cond", "switch between values", "implicit of grad of switch"),
    *("custom_jvp", "implicit of grad of custom_vjp", "grad of implicit of checkpoint"),
    *("value_and_grad of implicit", "implicit of grad, by the dense", "implicit of hessian"),
    *("device_put", "shard_map", "export"),
)

test_cell = matrix({name: ALL[name] for name in CELLS}, TYPES)
