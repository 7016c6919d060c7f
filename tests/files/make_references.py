"""Write `references.zip`: small folders written by other libraries, with their dequantized values.

`python make_references.py` writes all of them. `python make_references.py NAME...` writes only
these cases and keeps the others. It needs torch, transformers, accelerate, safetensors,
compressed-tensors, bitsandbytes and torchao, and the unpacked auto-gptq, autoawq and gptqmodel on
PYTHONPATH. Only the layers of these three are imported, because their packages need further
libraries.
"""

import importlib.machinery
import importlib.metadata
import json
import sys
import types
import zipfile
from pathlib import Path
from unittest import mock

import bitsandbytes as bnb
import compressed_tensors as ct
import torch
from compressed_tensors import quantization as ctq
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save
from torchao import quantization as ao
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

OUT = Path(__file__).with_name("references.zip")
LIBRARIES = ("torch", "compressed-tensors", "bitsandbytes", "torchao")


def only(package, *inner):
    """Make packages importable without running their `__init__`."""
    for name in (package, *(f"{package}.{x}" for x in inner)):
        path = importlib.machinery.PathFinder.find_spec(
            name, sys.modules[name.rpartition(".")[0]].__path__ if "." in name else None
        ).submodule_search_locations
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = list(path)


def linear(shape, dtype=torch.float16):
    out, size = shape
    layer = torch.nn.Linear(size, out, bias=False, dtype=dtype)
    layer.weight.data = torch.randn(shape).to(dtype) / 8
    return layer


def of_compressed_tensors(layout, shape, dtype=torch.bfloat16, **stated):
    """Write with the compressor of a layout, with scales as its observers compute them."""
    args = ctq.QuantizationArgs(**stated)
    scheme = ctq.QuantizationScheme(targets=["Linear"], weights=args, format=layout)
    w = linear(shape, dtype).weight.data
    out, size = shape
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(w, (0, -size % columns, 0, -out % rows))
        tiles = padded.unflatten(0, (-1, rows)).unflatten(-1, (-1, columns)).transpose(1, 2)
        low, high = tiles.amin((2, 3)), tiles.amax((2, 3))
    else:
        group = args.group_size if args.group_size and args.group_size > 0 else size
        tiles = w.reshape(1, -1) if args.strategy == "tensor" else w.unflatten(-1, (-1, group))
        low, high = tiles.amin(-1), tiles.amax(-1)
    above = generate_gparam(w.min(), w.max()) if layout.startswith("nvfp4") else None
    scale, zero = calculate_qparams(low, high, args, global_scale=above)
    state = {"weight": w, "weight_scale": scale, "weight_zero_point": zero}
    state |= {} if above is None else {"weight_global_scale": above}
    compressor = BaseCompressor.get_value_from_registry(layout)
    stored = compressor.compress(state, scheme)
    value = compressor.decompress(stored, scheme)["weight"]
    config = ctq.QuantizationConfig(
        config_groups={"group_0": scheme}, format=layout, quantization_status="compressed"
    )
    stated = {"version": ct.__version__, **config.model_dump(mode="json")}
    return {f"m.{name}": x for name, x in stored.items()}, value, stated


def of_bitsandbytes_4(kind, shape, nested, blocksize=64, storage=torch.uint8):
    """Write rows of whole blocks. For other rows its CPU kernel dequantizes with wrong scales."""
    stated = {"quant_type": kind, "compress_statistics": nested, "quant_storage": storage}
    layer = bnb.nn.Linear4bit(shape[1], shape[0], bias=False, **stated)
    layer.weight = bnb.nn.Params4bit(
        linear(shape, torch.bfloat16).weight.data,
        requires_grad=False,
        blocksize=blocksize,
        **stated,
    )
    layer = layer.to("cpu")
    value = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    stored = {f"m.{name}": x for name, x in layer.state_dict().items()}
    return stored, value, {"quant_method": "bitsandbytes", "load_in_4bit": True}


def of_bitsandbytes_8(shape):
    codes, scb, _ = bnb.functional.int8_vectorwise_quant(linear(shape).weight.data)
    stored = {
        "m.weight": codes,
        "m.SCB": scb,
        "m.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    value = bnb.functional.int8_vectorwise_dequant(codes, scb)
    return stored, value, {"quant_method": "bitsandbytes", "load_in_8bit": True}


def affine_grid(w, bits, group, sym, least=1):
    """Return scales and zero points `[out, groups]` like GPTQ's quantizer."""
    tiles, most = w.float().unflatten(-1, (-1, group)), 2**bits - 1
    low, high = tiles.amin(-1).clamp(max=0), tiles.amax(-1).clamp(min=0)
    if sym:
        high = torch.maximum(high, -low)
        low = -high
    scale = ((high - low) / most).half().float()
    zero = (-low / scale).round().clamp(least, most)
    return scale, torch.full_like(zero, 2 ** (bits - 1)) if sym else zero


def groups_of(size, group, desc_act):
    index = torch.arange(size, dtype=torch.int32) // group
    return index[torch.randperm(size)] if desc_act else index


def of_auto_gptq(bits, shape, group=32, *, sym=False, desc_act=False):
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    layer = linear(shape)
    scale, zero = affine_grid(layer.weight.data, bits, group, sym)
    packed = QuantLinear(bits, group, shape[1], shape[0], bias=False)
    index = groups_of(shape[1], group, desc_act)
    whole = layer.weight.data.float()  # values outside of the grid would spill into other codes
    near = (whole / scale[:, index]).round() + zero[:, index]
    near = near.clamp(0, 2**bits - 1) - zero[:, index]
    layer.weight.data = near * scale[:, index]
    packed.pack(layer, scale, zero, index)
    packed.scales = packed.scales.half()
    value = packed(torch.eye(shape[1], dtype=torch.float16)).T
    stored = {f"m.{name}": x for name, x in packed.state_dict().items()}
    stated = {"bits": bits, "group_size": group, "sym": sym, "desc_act": desc_act}
    return stored, value, {"quant_method": "gptq", "checkpoint_format": "gptq", **stated}


def of_gptqmodel(bits, shape, group=32, *, version=1, desc_act=False):
    """Write zero points that may be 0. Version 1 stores them minus one, with a borrow."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils import model

    layer = linear(shape)
    layer.weight.data[::3] = layer.weight.data[::3].abs()
    scale, zero = affine_grid(layer.weight.data, bits, group, False, least=0)
    assert (zero == 0).any()
    packed = TorchLinear(
        bits=bits,
        group_size=group,
        sym=False,
        desc_act=desc_act,
        in_features=shape[1],
        out_features=shape[0],
        bias=False,
        pack_dtype=torch.int32,
        register_buffers=True,
    )
    packed.pack_block(layer, scale, zero, groups_of(shape[1], group, desc_act))
    if version == 1:
        model.convert_gptq_v2_to_v1_format_module(packed, mock.Mock(bits=bits))
    names = ("qweight", "qzeros", "scales", "g_idx")
    stored = {f"m.{name}": getattr(packed, name).clone() for name in names}
    if version == 1:
        model.convert_gptq_v1_to_v2_format_module(packed, bits, torch.int32)
    packed.post_init()
    value = packed.dequantize_weight().T
    layout = "gptq" if version == 1 else "gptq_v2"
    stated = {"bits": bits, "group_size": group, "sym": False, "desc_act": desc_act}
    return stored, value, {"quant_method": "gptq", "checkpoint_format": layout, **stated}


def of_autoawq(shape, group=32, *, sym=False):
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    layer = linear(shape)
    scale, zero = affine_grid(layer.weight.data, 4, group, sym)
    index = torch.arange(shape[1]) // group
    near = (layer.weight.data.float() / scale[:, index]).round() + zero[:, index]
    layer.weight.data = (near.clamp(0, 15) - zero[:, index]) * scale[:, index]
    packed = WQLinear_GEMM.from_linear(
        layer, 4, group, scales=scale.T.contiguous(), zeros=zero.T.contiguous()
    )
    value = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, group).T
    stored = {f"m.{name}": x for name, x in packed.state_dict().items()}
    stated = {"bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return stored, value, {"quant_method": "awq", **stated}


def of_torchao(config, shape):
    layer = torch.nn.Sequential()
    layer.add_module("m", linear(shape, torch.bfloat16))
    ao.quantize_(layer, config)
    stored, metadata = flatten_tensor_state_dict(layer.state_dict())
    return stored, layer.m.weight.dequantize(), {"quant_method": "torchao"}, metadata


def cases():
    """Return the function and the arguments of each case."""
    packed = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group"}
    for bits in range(2, 9):
        of = packed | {"num_bits": bits, "group_size": 16}
        yield f"ct_pack_{bits}", of_compressed_tensors, ("pack-quantized", (13, 32)), of
    for bits in (3, 4, 5, 6, 7):
        of = packed | {"num_bits": bits, "symmetric": True, "strategy": "channel"}
        yield f"ct_pack_{bits}_odd", of_compressed_tensors, ("pack-quantized", (5, 45)), of
    of_bytes = {"num_bits": 8, "type": "int", "symmetric": True}
    for strategy in ("tensor", "channel"):
        of = of_bytes | {"strategy": strategy}
        yield f"ct_int_{strategy}", of_compressed_tensors, ("int-quantized", (12, 40)), of
        of = of | {"type": "float"}
        yield f"ct_float_{strategy}", of_compressed_tensors, ("float-quantized", (12, 40)), of
    of = of_bytes | {"strategy": "group", "group_size": 8}
    yield "ct_int_group", of_compressed_tensors, ("int-quantized", (12, 40)), of
    for group in (80, 96, 100, 112, 120):
        of = of_bytes | {"strategy": "group", "group_size": group}
        yield f"ct_int_group_{group}", of_compressed_tensors, ("int-quantized", (5, 2 * group)), of
        of = of | {"type": "float"}
        case = ("float-quantized", (5, 2 * group))
        yield f"ct_float_group_{group}", of_compressed_tensors, case, of
        of = packed | {"group_size": group}
        yield (
            f"ct_pack_group_{group}",
            of_compressed_tensors,
            ("pack-quantized", (13, 3 * group)),
            of,
        )
    of = of_bytes | {"strategy": "channel", "symmetric": False}
    yield "ct_int_unsymmetric", of_compressed_tensors, ("int-quantized", (12, 40)), of
    of = of_bytes | {"type": "float", "strategy": "block", "block_structure": [16, 16]}
    yield "ct_float_block", of_compressed_tensors, ("float-quantized", (24, 40)), of
    of = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    yield "ct_nvfp4", of_compressed_tensors, ("nvfp4-pack-quantized", (8, 64)), of
    for bits in (4, 6, 8):
        of = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32}
        of |= {"scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
        layout = "mxfp8-quantized" if bits == 8 else f"mxfp{bits}-pack-quantized"
        yield f"ct_mxfp{bits}", of_compressed_tensors, (layout, (8, 64)), of
    for kind in ("nf4", "fp4"):
        yield f"bnb_{kind}", of_bitsandbytes_4, (kind, (6, 128), False), {}
        yield f"bnb_{kind}_nested", of_bitsandbytes_4, (kind, (6, 128), True), {}
    for storage in (torch.bfloat16, torch.float16, torch.float32):
        name, of = f"{storage}".removeprefix("torch."), {"storage": storage}
        yield f"bnb_nf4_{name}", of_bitsandbytes_4, ("nf4", (6, 128), False), of
        yield f"bnb_fp4_nested_{name}", of_bitsandbytes_4, ("fp4", (6, 128), True), of
    yield "bnb_nested_twice", of_bitsandbytes_4, ("nf4", (129, 64), True, 32), {}
    yield "bnb_int8", of_bitsandbytes_8, ((12, 40),), {}
    for bits in (2, 3, 4, 8):
        yield f"auto_gptq_{bits}", of_auto_gptq, (bits, (32, 32), 16), {}
        yield f"auto_gptq_{bits}_sym", of_auto_gptq, (bits, (32, 32), 16), {"sym": True}
        yield f"auto_gptq_{bits}_desc_act", of_auto_gptq, (bits, (32, 32), 16), {"desc_act": True}
        yield f"gptqmodel_{bits}", of_gptqmodel, (bits, (32, 32), 16), {}
        yield f"gptqmodel_{bits}_v2", of_gptqmodel, (bits, (32, 32), 16), {"version": 2}
    yield "awq", of_autoawq, ((32, 32), 16), {}
    yield "awq_sym", of_autoawq, ((32, 32), 16), {"sym": True}
    yield "awq_group_96", of_autoawq, ((32, 192), 96), {}
    yield "ao_int8", of_torchao, (ao.Int8WeightOnlyConfig(version=2), (12, 40)), {}
    yield "ao_float8", of_torchao, (ao.Float8WeightOnlyConfig(), (12, 40)), {}
    for bits in range(2, 9):
        config = ao.IntxWeightOnlyConfig(getattr(torch, f"int{bits}"), ao.PerGroup(32))
        yield f"ao_intx_{bits}", of_torchao, (config, (12, 64)), {}


def main():
    for name in ("pcre", "logbar", "tokenicer", "device_smi", "defuser"):
        sys.modules[name] = mock.MagicMock()
    for name in ("defuser.utils", "defuser.modeling", "defuser.modeling.unfused_moe"):
        sys.modules[name] = mock.MagicMock()
    only("auto_gptq", "nn_modules", "nn_modules.qlinear")
    only("awq", "modules", "modules.linear", "utils")
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    chosen, before = sys.argv[1:], {}
    if chosen:
        with zipfile.ZipFile(OUT) as archive:
            kept = (name for name in archive.namelist() if name.partition("/")[0] not in chosen)
            before = {name: archive.read(name) for name in kept}
    with zipfile.ZipFile(OUT, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        write = lambda name, data: archive.writestr(zipfile.ZipInfo(name), data, 8, 9)
        for name, data in before.items():
            write(name, data)
        if not chosen:
            write("versions.json", json.dumps(versions, indent=1))
        for name, make, arguments, keywords in cases():
            if chosen and name not in chosen:
                continue
            torch.manual_seed(0)
            stored, value, stated, *metadata = make(*arguments, **keywords)
            stored = {key: x.contiguous() for key, x in stored.items()}
            write(f"{name}/model.safetensors", save(stored, *metadata))
            write(f"{name}/config.json", json.dumps({"quantization_config": stated}))
            write(f"{name}/value.safetensors", save({"m.weight": value.contiguous()}))
            print(name, value.dtype, list(value.shape), flush=True)


if __name__ == "__main__":
    main()
