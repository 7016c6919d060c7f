"""Compile matrix products in ONNX Runtime, for `cpu_matmul.py`.

Each product is a session with the graph that the quantizer of ONNX Runtime makes from a MatMul:
with 4-bit weights in blocks, or with 8-bit weights. Both quantize activations to 8 bits at run
time. To import this module, neither `onnx` nor `onnxruntime` is needed.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

Run = Callable[[np.ndarray], np.ndarray]
BLOCK = 128


def missing() -> list[str]:
    """Return the names of the required packages that are not installed."""
    return [name for name in ("onnx", "onnxruntime") if find_spec(name) is None]


def four_bits(codes: np.ndarray, scale: np.ndarray) -> Run:
    """Return a product with a 4-bit weight: MatMulNBits on int8 activations.

    **Arguments:**

    - `codes`: integers from -8 to 7, `[K, N]`.
    - `scale`: f32 `[K / 128, N]`.
    """
    from onnx import helper

    k, n = codes.shape
    fields = (codes.T + 8).astype(np.uint8)  # the default zero point is 8
    packed = (fields[:, ::2] | fields[:, 1::2] << 4).reshape(n, k // BLOCK, BLOCK // 2)
    product = helper.make_node(
        "MatMulNBits",
        ["x", "packed", "scale"],
        ["y"],
        domain="com.microsoft",
        K=k,
        N=n,
        bits=4,
        block_size=BLOCK,
        accuracy_level=4,  # activations in int8
    )
    return _session([product], (k, n), packed=packed, scale=scale.T.astype(np.float32))


def eight_bits(codes: np.ndarray, scale: np.ndarray) -> Run:
    """Return a product with an int8 weight: MatMulInteger with dynamic activations, fused.

    **Arguments:**

    - `codes`: int8 `[K, N]`.
    - `scale`: f32 `[1, N]`.
    """
    from onnx import TensorProto, helper

    node = helper.make_node
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["x_codes", "x_scale", "x_zero"]),
        node("MatMulInteger", ["x_codes", "codes", "x_zero", "zero"], ["sum"]),
        node("Cast", ["sum"], ["cast"], to=TensorProto.FLOAT),
        node("Mul", ["x_scale", "scale"], ["both"]),
        node("Mul", ["cast", "both"], ["y"]),
    ]
    zero = np.zeros(codes.shape[1], np.int8)
    return _session(nodes, codes.shape, codes=codes, scale=scale[0].astype(np.float32), zero=zero)


def _session(nodes: list[Any], shape: tuple[int, int], **constants: np.ndarray) -> Run:
    """Compile the graph that computes y from x `[M, K]`. Return it as a function."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    k, n = shape
    value = lambda name, size: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["M", size])
    initial = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "matmul", [value("x", k)], [value("y", n)], initial)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    # Otherwise its threads spin after a run and take a core from the next program.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, ["CPUExecutionProvider"]
    )
    return lambda x: session.run(["y"], {"x": x})[0]
