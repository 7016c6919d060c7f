"""A sample of the table in docs/qwix.md: whatever works in Qwix works here."""

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
def test_every_transformation_works(operation, operands, format, granularities):
    table = compare([OPERATION[operation]], [operands], [format], granularities)
    assert len(table) == len(granularities) * len(TRANSFORMATIONS)
    assert {cell: errors["veneer"] for cell, errors in table.items() if errors["veneer"]} == {}
    # The check can fail: Qwix works only in some transformations.
    assert any(not errors["Qwix"] for errors in table.values())
    assert not lost(table)
