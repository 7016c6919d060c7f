"""Damaged checkpoint folders raise one clear line, without a crash or too much memory.

There are a thousand changes per family, and a hundred in a quick run: to the JSON of the
configuration and of the header, to shapes, dtypes, offsets and single bytes, and to the end of
files.
"""

import copy
import json
import random
import tracemalloc

import numpy as np
import pytest
from support import arrays
from support import quantized_folders as folders
from support.every_type import value

import veneer as vn
from veneer.files.checkpoint import open_checkpoint

from .test_families import CONFIGS

FAMILIES = {
    "gptq": "gptq_3_desc_act",
    "awq": "awq",
    "pack_quantized": "pack_quantized_3",
    "pack_quantized_whole": "pack_quantized_3_whole",
    "mxfp6": "mxfp6_packed",
    "float_quantized": "float_quantized_blocks",
    "nvfp4": "nvfp4",
    "fp8": "fp8_last_block_odd",
    "bitsandbytes": "bitsandbytes_nf4_nested",
    "bitsandbytes_int8": "bitsandbytes_int8",
    "mxfp4": "mxfp4",
    "mlx": "mlx_5",
    "torchao": "torchao_intx_3",
    "torchao_int4": "torchao_int4",
}

ODD = [None, True, -1, 0, 1, 3, 7, 2**31, 2**62, 2**64, 1.5, 1e308, "", "gptq", [], [0], {}, [[]]]
DTYPES = ["U8", "I8", "I32", "U32", "F16", "BF16", "F32", "F64", "I64", "F8_E4M3", "F4", "X", ""]


def spoil_json(random_, content):
    """Change, remove or rename a value in a JSON object."""
    content = copy.deepcopy(content)
    node = content
    while True:
        if not node:
            return content
        key = random_.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if isinstance(node[key], dict | list) and node[key] and random_.random() < 0.8:
            node = node[key]
            continue
        kind = random_.randrange(4)
        if kind == 0:
            del node[key]
        elif kind == 1 and isinstance(node, dict):
            node[random_.choice(["m.weight", "bits", "m.scales", "x"])] = node.pop(key)
        elif isinstance(node[key], str) and kind == 2:
            node[key] = random_.choice(DTYPES)
        elif type(node[key]) is int and kind == 2:
            node[key] += random_.choice([-32, -1, 1, 8, 64])
        else:
            node[key] = random_.choice(ODD)
        return content


def spoil(random_, header, data, config):
    """Return the three parts of a folder, with one of them damaged."""
    kind = random_.randrange(6)
    text = json.dumps(header).encode()
    length = len(text)
    if kind == 0:
        config = json.dumps(spoil_json(random_, config)).encode()
    else:
        config = json.dumps(config).encode()
    if kind == 1:
        text = json.dumps(spoil_json(random_, header)).encode()
        length = len(text)
    elif kind == 2:
        at = random_.randrange(len(text))
        text = text[:at] + bytes([random_.randrange(256)]) + text[at + 1 :]
    elif kind == 3:
        length = random_.choice([0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1])
    elif kind == 4:
        data = data[: random_.randrange(len(data))]
    elif kind == 5:
        data = bytearray(data)
        for _ in range(8):
            data[random_.randrange(len(data))] = random_.randrange(256)
    return length.to_bytes(8, "little") + text + bytes(data), config


def read_all(path):
    """Return the error of loading a folder, if any, and the peak of allocated bytes."""
    tracemalloc.reset_peak()
    message = None
    try:
        with open_checkpoint(path) as source:
            for name in source:
                source.read(name)
    except ValueError as error:
        message = str(error)
    return message, tracemalloc.get_traced_memory()[1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:.*checkpoint_format:UserWarning")
def test_a_damaged_folder_is_read_or_refused_in_one_line(tmp_path, family, mutations):
    make, config = CONFIGS[FAMILIES[family]]
    path = folders.write(tmp_path / "model", make(np.random.default_rng(0))[0], **config)
    whole = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    random_ = random.Random(0)
    messages: list[str] = []
    tracemalloc.start()
    try:
        for _ in range(mutations):
            file, stated = spoil(random_, header, data, config)
            (path / "model.safetensors").write_bytes(file)
            (path / "config.json").write_bytes(stated)
            most = 64 * len(whole) + 2**20
            message, peak = read_all(path)
            if peak >= most:  # again, so that imports and caches do not count
                message, peak = read_all(path)
            assert peak < most
            messages += [message] if message else []
    finally:
        tracemalloc.stop()
    assert mutations // 4 < len(messages) < mutations
    for message in messages:
        assert message.startswith(str(path))
        assert len(message.splitlines()) == 1
        assert len(message) < 1000


def test_a_damaged_tree_is_read_or_refused_in_one_line(tmp_path, mutations):
    types = ("Banded", "LoraArray", "Named", "NMSparse, along -1", "Rotated", "SparseArray")
    tree = {name: value(name) for name in types}
    tree |= {"w": arrays.quantized("nvfp4", 4, 32), "more": [{"b": np.ones(3)}, (2.0, None)]}
    vn.save(path := tmp_path / "saved", tree)
    file = path / "veneer.json"
    content = json.loads(file.read_text("utf-8"))
    spoilt = {key: content[key] for key in ("tensors", "tree")}
    random_ = random.Random(0)
    messages: list[str] = []
    for _ in range(mutations // 2):
        file.write_text(json.dumps(content | spoil_json(random_, spoilt)), "utf-8")
        try:
            repr(vn.load(path))
        except ValueError as error:
            messages.append(str(error))
    assert mutations // 8 < len(messages) < mutations // 2
    for message in messages:
        assert message.startswith(str(path))
        assert len(message.splitlines()) == 1
