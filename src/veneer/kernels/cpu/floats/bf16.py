"""bf16 times a stored matrix, for many rows of an even number of columns; 6 or more."""

from typing import Any

from ....native.functions import native
from . import columns_many, rows_many
from .pairs import BF16


def kernel(orientation: str, kind: str) -> tuple[Any, Any, Any, Any]:
    """Makes the functions of a job: `prepare, count, work, finish`."""
    if orientation == "rows":
        many = rows_many.multiplier(kind, BF16)
        return _nothing, many.count, many.work, _nothing
    return _nothing, columns_many.count, columns_many.worker(kind, BF16), _nothing


@native
def _nothing(job):
    pass
