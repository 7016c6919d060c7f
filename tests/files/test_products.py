"""Weights of each family, as large as kernels take: products read them packed, and their bytes."""

import inspect
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import quantized_folders as folders

import veneer as vn
from veneer.types import Permuted

from .test_families import CONFIGS, E4M3, ct

OUT, IN = 192, 512
SIZES = {"out": OUT, "groups": IN // 128, "size": IN, "tile": 128, "shape": (OUT, IN)}

# Cases with other shapes, or with one scale for the whole weight.
OTHERS = ("odd", "share", "one_group", "fp8_whole", "int_quantized", "float_quantized")
WHOLE = {
    "int_quantized": (np.int8, (1, IN), (OUT, 1)),
    "float_quantized": (E4M3, (OUT, IN), (1,)),
    "float_quantized_rows": (E4M3, (1, IN), (OUT, 1)),
}


def enlarged(make):
    taken = inspect.signature(make).parameters
    sizes = {name: size for name, size in SIZES.items() if name in taken}
    if "shape" in sizes:
        sizes.pop("tile", None)
    elif "tile" not in sizes:  # of 32
        sizes["groups"] = IN // 32
    return partial(make, **sizes)


def stated(name, config):
    """The configuration, with the group size of a larger weight."""
    if not name.startswith("pack_quantized"):
        return config
    (group,) = config["quantization_config"]["config_groups"].values()
    bits = group["weights"]["num_bits"]
    return {"quantization_config": config["quantization_config"] | ct(bits, SIZES["tile"])}


LARGE = {
    name: (enlarged(make), stated(name, config))
    for name, (make, config) in CONFIGS.items()
    if not name.startswith(OTHERS) and not name.endswith(OTHERS)
}
LARGE |= {
    name: (
        partial(folders.scaled_bytes, dtype=dtype, shape=(OUT, IN), tile=tile, scale=scale),
        CONFIGS[name][1],
    )
    for name, (dtype, tile, scale) in WHOLE.items()
}


def loaded(path, name):
    make, config = LARGE[name]
    tensors, value = make(np.random.default_rng(0))
    return tensors, value, vn.load(folders.write(path, tensors, torch_dtype="float32", **config))


@pytest.mark.parametrize("name", LARGE)
def test_a_product_is_by_a_kernel_and_nothing_is_dense(tmp_path, name):
    _, value, tree = loaded(tmp_path / "model", name)
    w = tree["m.weight"]
    w = w if isinstance(w, Permuted) else w.replace(dense_dtype="float32")
    n, k = w.shape[-2:]
    x = np.random.default_rng(1).normal(size=(*w.shape[:-2], 1, k)).astype(np.float32)
    product = vn.implicit(lambda x, w: x @ jnp.swapaxes(w, -1, -2))
    said = [e.how for e in vn.explain(product)(x, w).events if e.primitive == "dot_general"]
    assert said[0].startswith("CPU kernel")  # another says that the order of columns is passed on
    compiled = jax.jit(product).lower(x, w).compile()
    assert not re.search(rf"(f32|bf16|f16)\[(\d,)?({n},{k}|{k},{n})\]", compiled.as_text())
    exact = x.astype(np.float64) @ np.swapaxes(np.asarray(value, np.float64), -1, -2)
    assert np.linalg.norm(compiled(x, w) - exact) < 1e-5 * np.linalg.norm(exact)


@pytest.mark.parametrize("name", LARGE)
def test_loaded_weights_take_the_bytes_of_the_file(tmp_path, name):
    tensors, _, tree = loaded(tmp_path / "model", name)
    held = sum(x.nbytes for x in tree.values())
    assert held <= 1.01 * sum(x.nbytes for x in tensors.values())
