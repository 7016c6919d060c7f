"""Make small random checkpoints of each family, and their dense arrays by plain NumPy."""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

NF4 = np.float32(
    "-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 "
    "-0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 "
    "0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941 "
    "0.7229568362236023 1.0".split()
)
FP4_BNB = np.float32([0, 0.0625, 8, 12, 4, 6, 2, 3]) / np.float32(12)
FP4_BNB = np.concatenate([FP4_BNB, -FP4_BNB])
E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def write(path, tensors, **config):
    """Write a folder with tensors and a `config.json`. `metadata` goes into the header."""
    path.mkdir(exist_ok=True)
    metadata = config.pop("metadata", None)
    contiguous = {k: np.ascontiguousarray(x) for k, x in tensors.items()}
    save_file(contiguous, path / "model.safetensors", metadata=metadata)
    (path / "config.json").write_text(json.dumps(config))
    return path


def bit_stream(codes, bits, axis):
    """Pack codes into 32-bit words along an axis, lowest bit first. Codes may cross words."""
    codes = np.moveaxis(codes, axis, -1)
    separate = (codes[..., None] >> np.arange(bits)) & 1
    separate = separate.reshape(*codes.shape[:-1], -1).astype(np.uint64)
    lack = -separate.shape[-1] % 32
    separate = np.pad(separate, [(0, 0)] * (codes.ndim - 1) + [(0, lack)])
    separate = separate.reshape(*codes.shape[:-1], -1, 32)
    words = (separate << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def words_of(codes, bits, axis):
    """Pack codes into 32-bit words along an axis. Each word holds only whole codes."""
    codes = np.moveaxis(codes, axis, -1)
    count = 32 // bits
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % count)])
    parts = codes.reshape(*codes.shape[:-1], -1, count).astype(np.uint64)
    words = (parts << (np.arange(count, dtype=np.uint64) * bits)).sum(-1).astype(np.uint32)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def random_scales(rng, *shape, dtype=np.float16):
    return (rng.uniform(0.5, 2, shape) / 64).astype(dtype)


def gptq(
    rng,
    *,
    bits=4,
    out=32,
    groups=3,
    tile=32,
    size=None,
    sym=False,
    plus_one=True,
    order="sorted",
):
    """With `size`, the last group may be shorter. With `order=None`, there is no `g_idx`."""
    size, half = size or groups * tile, 2 ** (bits - 1)
    groups = -(-size // tile)
    q = rng.integers(0, 2**bits, (size, out))
    z = rng.integers(1, 2**bits, (groups, out)) if not sym else np.full((groups, out), half)
    s = random_scales(rng, groups, out)
    group = np.arange(size) // tile
    if order == "desc_act":
        group = group[rng.permutation(size)]
    tensors = {
        "m.qweight": bit_stream(q, bits, 0),
        "m.qzeros": bit_stream(z - plus_one, bits, 1),
        "m.scales": s,
        "m.bias": np.ones(out, np.float16),
    }
    tensors |= {"m.g_idx": group.astype(np.int32)} if order else {}
    return tensors, ((q - z[group]) * s[group].astype(np.float32)).T


def awq(rng, *, out=32, groups=3, tile=32, size=None, sym=False):
    size = size or groups * tile
    groups = -(-size // tile)
    q = rng.integers(0, 16, (size, out))
    z = np.full((groups, out), 8) if sym else rng.integers(0, 16, (groups, out))
    s = random_scales(rng, groups, out)
    in_words = lambda x: x.reshape(len(x), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(x.shape)
    tensors = {
        "m.qweight": words_of(in_words(q), 4, 1),
        "m.qzeros": words_of(in_words(z), 4, 1),
        "m.scales": s,
    }
    group = np.arange(size) // tile
    return tensors, ((q - z[group]) * s[group].astype(np.float32)).T


def pack_quantized(
    rng, *, bits=4, out=12, size=96, tile=32, sym=False, desc_act=False, whole=False
):
    """With `whole`, each word holds only whole codes, as before version 0.18."""
    pack = words_of if whole else bit_stream
    groups = -(-size // tile)
    q = rng.integers(0, 2**bits, (out, size))
    z = np.full((out, groups), 2 ** (bits - 1))
    z = z if sym else rng.integers(0, 2**bits, (out, groups))
    s = random_scales(rng, out, groups, dtype=ml_dtypes.bfloat16)
    group = np.arange(size) // tile
    if desc_act:
        group = group[rng.permutation(size)]
    tensors = {
        "m.weight_packed": pack(q, bits, 1),
        "m.weight_scale": s,
        "m.weight_shape": np.array([out, size]),
    }
    tensors |= {} if sym else {"m.weight_zero_point": pack(z, bits, 0)}
    tensors |= {"m.weight_g_idx": group.astype(np.int32)} if desc_act else {}
    return tensors, (q - z[:, group]) * s[:, group].astype(np.float32)


def spread(entries, shape, tile):
    """Repeat each entry over its tile. The last tiles may be shorter."""
    for axis, size in enumerate(tile):
        entries = np.repeat(entries, size, axis)
    return entries[tuple(map(slice, shape))]


def scaled_bytes(rng, *, dtype, shape=(24, 40), tile=(8, 8), name="m.weight_scale", scale=None):
    counts = [-(-n // t) for n, t in zip(shape, tile, strict=True)]
    q = rng.integers(-100, 100, shape).astype(np.int8)
    q = q if dtype == np.int8 else (q / 16).astype(dtype)
    s = random_scales(rng, *counts, dtype=np.float32)
    tensors = {"m.weight": q, name: s if scale is None else s.reshape(scale)}
    return tensors, q.astype(np.float32) * spread(s, shape, tile)


def nibbles(q, *, high_first=False):
    """Pack two codes per byte along the last axis."""
    q = np.pad(q.astype(np.uint8), [(0, 0)] * (q.ndim - 1) + [(0, q.shape[-1] % 2)])
    first, second = q[..., ::2], q[..., 1::2]
    return first << 4 | second if high_first else first | second << 4


def nvfp4(rng, *, shape=(6, 64)):
    q = rng.integers(0, 16, shape)
    s = rng.uniform(1, 400, (shape[0], shape[1] // 16)).astype(ml_dtypes.float8_e4m3fn)
    above = np.float32([64.0])
    tensors = {
        "m.weight_packed": nibbles(q),
        "m.weight_scale": s,
        "m.weight_global_scale": above,
    }
    return tensors, E2M1[q] * np.repeat(s.astype(np.float32) / above, 16, 1)


def microscaling(rng, *, bits=4, shape=(6, 64)):
    """mxfp4, mxfp6 with e2m3, or mxfp8, as compressed-tensors writes them."""
    q = rng.integers(0, 127 if bits == 8 else 2**bits, shape)
    s = rng.integers(100, 140, (shape[0], shape[1] // 32)).astype(np.uint8)
    if bits == 8:
        codes, value = "weight", q.astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
        stored = value
    else:
        of = ml_dtypes.float4_e2m1fn if bits == 4 else ml_dtypes.float6_e2m3fn
        codes, value = "weight_packed", q.astype(np.uint8).view(of)
        stored = bit_stream(q, bits, 1).view(np.uint8)
    tensors = {f"m.{codes}": stored, "m.weight_scale": s}
    return tensors, value.astype(np.float32) * np.repeat(2.0 ** (s.astype(np.float32) - 127), 32, 1)


def mxfp4_experts(rng, *, experts=2, out=6, groups=3):
    q = rng.integers(0, 16, (experts, out, groups * 32))
    s = rng.integers(100, 140, (experts, out, groups)).astype(np.uint8)
    tensors = {
        "m.weight_blocks": nibbles(q).reshape(experts, out, groups, 16),
        "m.weight_scales": s,
    }
    value = E2M1[q] * np.repeat(2.0 ** (s.astype(np.float32) - 127), 32, -1)
    return tensors, value.swapaxes(-1, -2)


def bitsandbytes(rng, *, kind="nf4", shape=(12, 96), tile=64, nested=False, storage=np.uint8):
    """With `storage`, bytes are stored as numbers of another dtype (`quant_storage`)."""
    codebook = NF4 if kind == "nf4" else FP4_BNB
    n = shape[0] * shape[1]
    q = rng.integers(0, 16, n)
    blocks = -(-n // tile)
    state = {"quant_type": kind, "blocksize": tile, "dtype": "bfloat16", "shape": shape}
    tensors = {}
    if nested:
        from veneer.quant import FORMATS

        codes = rng.integers(0, 256, blocks).astype(np.uint8)
        book = np.float32(FORMATS["dynamic8"].codebook)
        above = random_scales(rng, -(-blocks // 8), dtype=np.float32)
        state |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": 0.25}
        absmax = book[codes] * np.repeat(above, 8)[:blocks] + np.float32(0.25)
        tensors = {"m.weight.nested_absmax": above, "m.weight.nested_quant_map": book}
    else:
        codes = absmax = random_scales(rng, blocks, dtype=np.float32)
    tensors |= {
        "m.weight": nibbles(q, high_first=True).view(storage)[:, None],
        "m.weight.absmax": codes,
        "m.weight.quant_map": codebook,
        f"m.weight.quant_state.bitsandbytes__{kind}": np.frombuffer(
            json.dumps(state).encode(), np.uint8
        ),
    }
    return tensors, (codebook[q] * np.repeat(absmax, tile)[:n]).reshape(shape)


def int8_rows(rng, *, shape=(6, 10)):
    q = rng.integers(-127, 128, shape).astype(np.int8)
    scb = rng.uniform(1, 4, shape[0]).astype(np.float32)
    tensors = {"m.weight": q, "m.SCB": scb, "m.weight_format": np.uint8(0)}
    return tensors, q * (scb / np.float32(127))[:, None]


def mlx(rng, *, bits=4, shape=(6, 192), tile=64):
    q = rng.integers(0, 2**bits, shape)
    s = random_scales(rng, shape[0], shape[1] // tile)
    b = -random_scales(rng, shape[0], shape[1] // tile)
    tensors = {"m.weight": bit_stream(q, bits, 1).view(np.uint32), "m.scales": s, "m.biases": b}
    wide = lambda x: np.repeat(x, tile, 1).astype(np.float32)
    return tensors, q * wide(s) + wide(b)


def mlx_float(rng, *, mode, shape=(6, 64)):
    q = rng.integers(0, 16, shape)
    tile = 32 if mode == "mxfp4" else 16
    s = rng.integers(100, 120, (shape[0], shape[1] // tile)).astype(np.uint8)
    of = ml_dtypes.float8_e8m0fnu if mode == "mxfp4" else ml_dtypes.float8_e4m3fn
    tensors = {"m.weight": bit_stream(q, 4, 1).view(np.uint32), "m.scales": s}
    return tensors, E2M1[q] * np.repeat(s.view(of).astype(np.float32), tile, 1)


def torchao(rng, *, kind, bits=8, shape=(6, 64), tile=16, zero=False):
    """The header is separate: see `torchao_metadata`."""
    counts = (shape[0], shape[1] // tile)
    half = 2 ** (bits - 1)
    q = rng.integers(-half, half, shape)
    s = random_scales(rng, *counts, dtype=ml_dtypes.bfloat16)
    wide = lambda x: np.repeat(x, tile, 1).astype(np.float32)
    if kind == "Int4Tensor":
        z = random_scales(rng, *counts, dtype=ml_dtypes.bfloat16)
        tensors = {"qdata": nibbles(q & 15).view(np.int8), "scale": s.T, "zero_point": z.T}
        value = q * wide(s) + wide(z)
    elif kind == "Float8Tensor":
        q = (q / 16).astype(ml_dtypes.float8_e4m3fn)
        tensors, value = {"qdata": q, "scale": s}, q.astype(np.float32) * wide(s)
    else:
        z = rng.integers(-half, half, counts) * zero
        tensors = {"qdata": q.astype(np.int8), "scale": s, "zero_point": z.astype(np.int8)}
        value = (q - wide(z)) * wide(s)
    return {f"m._weight_{name}": x for name, x in tensors.items()}, value


def torchao_metadata(kind, bits=8, tile=16):
    dtype = lambda name: {"_type": "torch.dtype", "_data": name}
    data = {
        "block_size": [1, tile],
        "dtype": dtype("bfloat16"),
        "target_dtype": dtype(f"int{bits}"),
    }
    said = {"_type": kind, "_data": data, "_tensor_data_names": ["qdata", "scale"]}
    return {"m.weight": json.dumps(said), "tensor_names": '["m.weight"]'}
