"""Time products with weights in the formats of checkpoints on a CPU, compared with XLA in f32.

    python benchmarks/checkpoint_products.py            # for docs/checkpoints.md; 15 minutes
    python benchmarks/checkpoint_products.py --quick    # small sizes, to see that it runs

A product of M rows with the transpose of a weight `[N, K]`, which has tiles along K, is one program
under `jax.jit`, with the weight as an argument. All programs run in one process, in a new random
order in each round. Each call takes another copy of the weight. XLA multiplies the dense weight as
`[N, K]` and as `[K, N]`, and the faster of the two counts.

Each result is first compared with the product in f64. No program may materialize the weight. With
*activations int8*, the program rounds activations per tile, as llama.cpp does.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import Side, markdown_table, medians, parser

import veneer as vn
from veneer.quant import ActivationQuantized, QArray

IN_INT8 = ", activations int8"
# Name, qtype, tile, and how the scales and the minima are stored.
FORMATS = (
    ("Q8_0", "int8", 32, "float16", None),
    ("Q8_0" + IN_INT8, "int8", 32, "float16", None),
    ("Q6_K", "int6", 16, "int8 by 16", None),
    ("Q6_K" + IN_INT8, "int6", 16, "int8 by 16", None),
    ("Q6_K, scales made f32 before", "int6", 16, "float32", None),
    ("Q5_0", "int5", 32, "float16", None),
    ("Q5_1", "uint5", 32, "float16", "float16"),
    ("Q4_0", "int4", 32, "float16", None),
    ("Q4_0" + IN_INT8, "int4", 32, "float16", None),
    ("Q4_1", "uint4", 32, "float16", "float16"),
    ("Q4_1" + IN_INT8, "uint4", 32, "float16", "float16"),
    ("Q4_K", "uint4", 32, "uint6 by 8", "uint6 by 8"),
    ("Q4_K" + IN_INT8, "uint4", 32, "uint6 by 8", "uint6 by 8"),
    ("Q4_K, scales made f32 before", "uint4", 32, "float32", "float32"),
    ("MLX, 4 bits", "uint4", 64, "bfloat16", "bfloat16"),
    ("MXFP4", "float4_e2m1fn", 32, "float8_e8m0fnu", None),
    ("MXFP6", "float6_e2m3fn", 32, "float8_e8m0fnu", None),
    ("3 bits", "int3", 128, "float16", None),
    ("TQ2_0", "int2", 256, "float16", None),
    ("TQ1_0", "ternary", 256, "float16", None),
)


def numbers(counts: tuple[int, int], stored_as: str, seed: int) -> Any:
    """Return random scales or minima `[N, K / tile]`.

    **Arguments:**

    - `stored_as`: a float dtype, or the format and tile of quantized scales, such as "uint6 by 8".
    """
    rng = np.random.default_rng(seed)
    if " by " not in stored_as:
        return jnp.asarray(2.0 ** rng.integers(-3, 1, counts), stored_as)
    qtype, tile = stored_as.split(" by ")
    format = vn.quant.get_format(qtype)
    codes = jnp.asarray(rng.integers(1, format.code_range[1] + 1, counts), format.code_dtype)
    scale = rng.uniform(0.01, 0.02, (counts[0], counts[1] // int(tile)))
    return QArray(codes, jnp.asarray(scale, "float16"), qtype=qtype).replace(dense_dtype="float32")


def stored(n: int, k: int, qtype: str, tile: int, scale: str, minimum: str | None) -> QArray:
    """Return a random weight `[n, k]` in a format, with f32 as its dense dtype."""
    format = vn.quant.get_format(qtype)
    low, high = format.code_range
    codes = np.random.default_rng(0).integers(low, high + 1, (n, k))
    counts = n, k // tile
    return QArray(
        jnp.asarray(codes, format.code_dtype),
        numbers(counts, scale, 1),
        qtype=qtype,
        minimum=None if minimum is None else numbers(counts, minimum, 2),
    ).replace(dense_dtype="float32")


def side(name: str, product: Any, x: jax.Array, w: Any, dense: np.ndarray, rotated: int) -> Side:
    """Compile a product, check its result and that no dense weight is made, and return a side."""
    compiled = jax.jit(product).lower(x, w).compile()
    if not isinstance(w, jax.Array):
        n, k = w.shape
        assert not re.search(rf"f32\[(1,)?({n},{k}|{k},{n})\]", compiled.as_text()), name
    if isinstance(w, ActivationQuantized):
        tiles = {1: w.tile_size}
        x_met = vn.quant.quantize(x, w.qtype, channelwise_axes=[0], tiled_axes=tiles).dequantize()
    else:
        x_met = x
    expected = np.asarray(x_met, np.float64) @ dense.T
    error = np.linalg.norm(compiled(x, w) - expected) / np.linalg.norm(expected)
    assert error < 1e-5, (name, error)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(w))
    copies = [jax.tree.map(jnp.copy, w) for _ in range(max(2, -(-rotated // nbytes)))]
    turns = itertools.cycle(copies)
    return Side(name, lambda: compiled(x, next(turns)))


def rows_of_table(m: int, size: int, rotated: int, rounds: int) -> Iterator[list[str]]:
    """Measure and yield a row for each format."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(m, size)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(size, size)), jnp.float32)
    turned = vn.implicit(lambda x, w: x @ w.T)
    dense = [
        side("[N, K]", lambda x, w: x @ w.T, x, w, np.asarray(w, np.float64), rotated),
        side("[K, N]", lambda x, w: x @ w, x, w, np.asarray(w.T, np.float64), rotated),
    ]
    for name, *how in FORMATS:
        q: Any = stored(size, size, *how)
        values = np.asarray(q.dequantize(), np.float64)
        if name.endswith(IN_INT8):
            q = ActivationQuantized(q, qtype="int8", tile_size=how[1], contracting=(-1,))
        ours = side(name, turned, x, q, values, rotated)
        seconds = medians([*dense, ours], rounds=rounds)
        f32 = min(seconds[each.name] for each in dense)
        figures = f"{1e3 * seconds[name]:.2f}", f"{1e3 * f32:.2f}", f"{f32 / seconds[name]:.1f} ×"
        yield [name, str(m), *figures]


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    options.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="M")
    arguments = options.parse_args()
    size, rotated = (512, 1_000_000) if arguments.quick else (4096, 150_000_000)
    rows = (rows_of_table(m, size, rotated, arguments.rounds) for m in arguments.rows)
    header = ["", "M", "ms", "XLA f32, ms", "times as fast"]
    print(markdown_table(header, itertools.chain.from_iterable(rows)))
