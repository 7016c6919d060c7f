"""A sample of the table in docs/qwix.md: no cell where Qwix works and we do not."""

import pytest
from qwix_comparison import OPERATIONS, TRANSFORMATIONS, compare, lost

OPERATION = {op.name: op for op in OPERATIONS}
SAMPLE = [
    ("dot_general", "both", "int8", ["channel"]),
    ("einsum", "weight", "int4", ["tile 32"]),
    ("conv_general_dilated", "both", "int8", ["channel"]),
    ("ragged_dot", "weight", "nf4", ["tile 32"]),
]


@pytest.mark.parametrize(("operation", "operands", "format", "granularities"), SAMPLE)
def test_we_work_in_every_transformation(operation, operands, format, granularities):
    table = compare([OPERATION[operation]], [operands], [format], granularities)
    assert len(table) == len(granularities) * len(TRANSFORMATIONS)
    assert {cell: errors["veneer"] for cell, errors in table.items() if errors["veneer"]} == {}
    # It tells a library that works from one that does not: Qwix does in some of these.
    assert any(not errors["Qwix"] for errors in table.values())
    assert not lost(table)
