"""A pytest plugin that runs Qwix's own tests on `veneer.interop.qwix`.

The public names come from `veneer.interop.qwix`. The functions here give `veneer.quant` the
private names of `qwix._src.core`. Qwix's `get_how_to_quantize`, which computes nothing, still says
which axes of an operand share a scale.

If the environment variable QWIX names a checkout of Qwix's main branch, mx formats have biased
scales.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import veneer as vn
import veneer.interop.qwix as qwix
from veneer.interop.qwix import QArray
from veneer.quant import BackwardProduct, FakeQuantized

BIASED = ("mxfp8", "mxfp8_16", "mxfp4") if "QWIX" in os.environ else ()


def quantize(array: jax.Array, how: Any) -> QArray:
    """Quantize an array as a `HowToQuantize` describes."""
    is_biased = how.qtype in BIASED and how.calibration_method == "absmax"
    return qwix.quantize(
        array,
        how.qtype,
        channelwise_axes=[axis for axis in how.channelwise_axes if axis not in how.tiled_axes],
        tiled_axes=how.tiled_axes,
        calibration_method="oas" if is_biased else how.calibration_method,
    )


def compute_scale_zero_point(calibration: dict[str, jax.Array], qtype: Any) -> Any:
    high = calibration["absmax"] if "absmax" in calibration else calibration["max"]
    if qtype in BIASED:  # the scales of tiles whose values are all the largest
        size = vn.quant.get_format(qtype).tile_size
        tiles = jnp.broadcast_to(high[..., None], (*high.shape, size))
        q = vn.quant.quantize(
            tiles, qtype, channelwise_axes=range(high.ndim), tiled_axes={-1: size},
            calibration_method="oas",
        )  # fmt: skip
        return q.scales()[..., 0].astype(high.dtype), None
    return vn.quant.scale_of_range(qtype, high, calibration.get("min"))


def stored(codes: jax.Array, format: Any) -> jax.Array:
    """Return codes in the dtype that Qwix has them in: small floats are floats."""
    if format.name in ("mxfp4", "nvfp4"):
        return format.decode(codes, jnp.float32).astype(jnp.float4_e2m1fn)
    return codes.astype(format.code_dtype)


def convert_to(array: jax.Array, qtype: Any, noise_fn: Any = None) -> jax.Array:
    format = vn.quant.get_format(qtype)
    if noise_fn is None:
        return stored(format.encode(array), format)
    return vn.quant.quantize_with_scale(array, qtype, 1.0, key=noise_fn.args[0]).qvalue


def convert_from(codes: jax.Array, qtype: Any) -> jax.Array:
    if jnp.issubdtype(codes.dtype, jnp.floating):
        return codes
    return vn.quant.get_format(qtype).decode(codes, jnp.float32)


def prune_in_groups(
    prune: Callable[[jax.Array], jax.Array], x: jax.Array, size: int, order: str
) -> jax.Array:
    """Prune each group of `size` consecutive values, along rows ("R") or columns ("C")."""
    if x.size % size:
        raise ValueError(f"groups of {size} do not divide the size of {x.shape}")
    rows = x if order == "R" else x.mT
    pruned = prune(rows.astype(jnp.float32).reshape(-1, size)).reshape(rows.shape)
    return pruned if order == "R" else pruned.mT


def get_sparsity_mask(
    x: jax.Array, n_sparsity: int, m_sparsity: int, order: str = "R", block_size: int = 1
) -> jax.Array:
    sparsity = (n_sparsity, m_sparsity, block_size)
    mask = lambda rows: vn.quant.sparsity_masks(
        FakeQuantized(rows, tile_axis=-1, sparsity=sparsity)
    )
    return prune_in_groups(mask, x, m_sparsity * block_size, order)


def prune_inputs_n_m(x: jax.Array, *, n: int, m: int, order: str) -> jax.Array:
    prune = lambda rows: vn.types.NMSparse.prune(rows, n, m, -1).materialise()
    return prune_in_groups(prune, x, m, order).astype(x.dtype)


def sparsify(x: jax.Array, rule: Any) -> jax.Array:
    order = rule.weight_sparsity_order
    return prune_inputs_n_m(x, n=rule.weight_sparsity_n, m=rule.weight_sparsity_m, order=order)


def trained(
    product: Callable[..., jax.Array], lhs: jax.Array, rhs: jax.Array, config: Any, **of: Any
) -> jax.Array:
    """Return a product whose second operand is the weight, as a `...QtConfig` describes."""
    say = lambda name: getattr(config, name, None)
    original = say("use_original_residuals")

    def backward(name: str) -> BackwardProduct:
        residual = say(f"{name}_residual_qtype") if original else "forward"
        tile_size = say(f"{name}_tile_size")
        return BackwardProduct(
            say(f"{name}_grad_qtype"), tile_size=tile_size, residual_qtype=residual
        )

    rule = say("sparsity_rule")
    tiles = {"tile_size": say("tile_size"), "act_tile_size": say("tile_size")}
    weight = FakeQuantized(
        rhs,
        qtype=config.rhs_qtype,
        calibration_method=say("rhs_calibration_method"),
        act_qtype=config.lhs_qtype,
        act_calibration_method=say("lhs_calibration_method"),
        grad_input=backward("dlhs"),
        grad_weight=backward("drhs"),
        sparsity=rule and (rule.weight_sparsity_n, rule.weight_sparsity_m),
        **tiles | of,
    )
    return vn.implicit(product)(lhs, weight)


def dot_general_qt(lhs: jax.Array, rhs: jax.Array, numbers: Any, config: Any) -> jax.Array:
    return trained(lambda x, w: lax.dot_general(x, w, numbers), lhs, rhs, config)


def conv_general_qt(lhs: jax.Array, rhs: jax.Array, config: Any, **how: Any) -> jax.Array:
    spec = lax.conv_dimension_numbers(lhs.shape, rhs.shape, how["dimension_numbers"]).rhs_spec
    product = functools.partial(lax.conv_general_dilated, **how)
    return trained(product, lhs, rhs, config, tile_axis=spec[1:])


def ragged_dot_qt(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, config: Any) -> jax.Array:
    """Return a product in which all groups share the scale of a column."""
    product = lambda x, w: lax.ragged_dot(x, w, sizes)
    return trained(product, lhs, rhs, config, tile_size={-3: 1.0})


def tiled_axes(q: QArray) -> dict[int, int]:
    tiles = zip(q.tile_shape, q.shape, strict=True)
    return {axis: tile for axis, (tile, size) in enumerate(tiles) if 1 < tile < size}


# Several functions of Qwix are one function here, which selects a strategy.
OURS = {
    "qarray": {
        "QArray": QArray,
        "quantize": quantize,
        "quantize_api": qwix.quantize,
        "dequantize": qwix.dequantize,
        "quantize_with_scale_zero_point": vn.quant.quantize_with_scale,
        "compute_scale_zero_point": compute_scale_zero_point,
        "get_tiled_axes": tiled_axes,
        "validate_qarray": lambda q: None,  # all arrays are valid
        "broadcast_to": qwix._repeat_to,
        "sparsify": sparsify,
    },
    "numerics": {
        "convert_to": convert_to,
        "convert_from": convert_from,
        "get_symmetric_bound": lambda qtype: vn.quant.get_format(qtype).bound,
        "get_asymmetric_bound": lambda qtype: vn.quant.scale_of_range(qtype, 1.0, -1.0),
    },
    "sparsity": {
        "get_sparsity_mask": get_sparsity_mask,
        "prune_inputs_n_m": prune_inputs_n_m,
        "apply_sparsity": lambda x, mask, is_channelwise=False: jnp.where(mask, x, 0),
    },
    "dot_general": dict.fromkeys(
        ["dot_general", "_slow_dot_general", "_fast_dot_general", "loop_dot_general"],
        qwix.dot_general,
    ),
    "einsum": {"einsum": qwix.einsum},
    "conv_general": dict.fromkeys(
        ["conv_general_dilated", "_slow_conv_general_dilated", "_fast_conv_general_dilated"],
        qwix.conv_general_dilated,
    ),
    "ragged_dot": {"ragged_dot": qwix.ragged_dot}
    | dict.fromkeys(
        ["ragged_dot_general", "_slow_ragged_dot_general", "_fast_ragged_dot_general"],
        qwix.ragged_dot_general,
    ),
    "dot_general_qt": {"dot_general_qt": dot_general_qt},
    "conv_general_qt": {"conv_general_qt": conv_general_qt},
    "ragged_dot_qt": {"ragged_dot_qt": ragged_dot_qt},
}

# The descriptions of quantized arrays, and the references of the tests.
THEIRS = {
    "qarray": ["HowToQuantize", "calibrate", "clip_to_calibration", "call_with_generic_broadcast"],
    "sparsity": ["SparsityRule"],
    "dot_general": ["get_how_to_quantize"],
    "einsum": ["get_how_to_quantize"],
    "conv_general": ["get_how_to_quantize"],
    "ragged_dot": ["_BASIC_RAGGED_DOT_DIMENSION_NUMBERS"],
    "dot_general_qt": ["DotGeneralQtConfig"],
    "conv_general_qt": ["ConvGeneralQtConfig"],
    "ragged_dot_qt": ["RaggedDotQtConfig"],
}


def pytest_configure() -> None:
    core = importlib.import_module("qwix._src.core")
    theirs = {name: importlib.import_module(f"{core.__name__}.{name}") for name in OURS}
    importlib.import_module(f"{core.__name__}.mxfp_dot")
    for name, ours in OURS.items():
        module = ModuleType(f"{core.__name__}.{name}")
        vars(module).update({of: getattr(theirs[name], of) for of in THEIRS.get(name, ())}, **ours)
        sys.modules[module.__name__] = module
        setattr(core, name, module)
    names: Any = QArray
    names.qvalue = property(lambda q: stored(q.codes(), q.format))
    names.scale_tile_shape = QArray.tile_shape
    names.zero_point_tile_shape = property(lambda q: q.zero_point and q.tile_shape)


def pytest_runtest_setup(item: Any) -> None:
    """Use the older random numbers of JAX in two files, as in Qwix's own runs."""
    of_old = item.path.name in ("qarray_test.py", "two_dim_scales_test.py")
    jax.config.update("jax_threefry_partitionable", not of_old)


# A product that takes a TPU, with fewer rows and columns and a sum of as many terms.
SMALLER = {(1024, 4096): (64, 4096), (4096, 32768): (4096, 256)}


@pytest.fixture(autouse=True)
def smaller(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "test_einsum_and_benchmark" in request.node.name:
        make = request.cls._make_array
        monkeypatch.setattr(
            request.cls,
            "_make_array",
            lambda self, shape, *args: make(self, SMALLER.get(shape, shape), *args),
        )
