"""Folders written by other libraries agree to the bit with their dequantized values.

`make_references.py` runs the libraries.
"""

import zipfile
from pathlib import Path

import numpy as np
import pytest

import veneer as vn
from veneer.types import Permuted

REFERENCES = Path(__file__).with_name("references.zip")
with zipfile.ZipFile(REFERENCES) as archive:
    NAMES = sorted({name.partition("/")[0] for name in archive.namelist() if "/" in name})

# Units in the last place. The reference multiplies or divides in another order or dtype.
ROUNDED = {"bnb_int8": 2}


def in_dtype(w, dtype):
    if isinstance(w, Permuted):
        return vn.materialise(Permuted(in_dtype(w.array, dtype), w.order, w.axis))
    return w.replace(dense_dtype=dtype.name).dequantize()


def places(x):
    """Map floats to integers in the same order, with adjacent floats at adjacent integers."""
    bits = x.view(f"int{8 * x.itemsize}").astype(np.int64)
    return np.where(bits < 0, np.iinfo(f"int{8 * x.itemsize}").min - bits, bits)


@pytest.mark.parametrize("name", NAMES)
def test_folders_agree_with_the_library_that_wrote_them(tmp_path, name):
    with zipfile.ZipFile(REFERENCES) as archive:
        for file in ("config.json", "model.safetensors", "value.safetensors"):
            archive.extract(f"{name}/{file}", tmp_path)
    (tmp_path / name / "value.safetensors").rename(tmp_path / "value.safetensors")
    value = np.asarray(vn.load(tmp_path / "value.safetensors")["m.weight"])
    loaded = vn.load(tmp_path / name)
    assert set(loaded) == {"m.weight"}
    got = np.asarray(in_dtype(loaded["m.weight"], value.dtype))
    assert got.shape == value.shape
    furthest = np.abs(places(got) - places(value)).max()
    assert furthest <= ROUNDED.get(name, 0)
