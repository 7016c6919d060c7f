"""Primitives that move entries, and the loops that are generated for them."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn
from veneer.numba import compiler
from veneer.numba.codegen.graph import trace

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 7

MOVES = {
    "transpose": lambda x: jnp.transpose(x, (2, 0, 1)),
    "reshape": lambda x: x.reshape(4, 6),
    "split an axis": lambda x: x.reshape(2, 3, 2, 2).transpose(2, 0, 3, 1),
    "reshape what is turned": lambda x: x.transpose(2, 1, 0).reshape(8, 3),
    "reshape what is reversed": lambda x: x[:, ::-1].reshape(6, 4)[::2].reshape(-1),
    "slice": lambda x: x[:, 1:, ::2],
    "reverse": lambda x: x[::-1, :, ::-1],
    "broadcast": lambda x: jnp.broadcast_to(x[:, :1], (2, 5, 4)),
    "new axes": lambda x: x[:, None, 0, :, None].squeeze(-1),
    "iota": lambda x: x + jnp.arange(4) + lax.iota(jnp.int32, 3)[:, None],
    "pad": lambda x: lax.pad(x, jnp.float32(5), [(1, 0, 0), (-1, 2, 1), (0, -2, 0)]),
    "pad and cut": lambda x: lax.pad(x, jnp.float32(5), [(0, 0, 2), (2, -3, 2), (-4, 3, 0)]),
    "concatenate": lambda x: jnp.concatenate([x, x[:, :1] * 2, x], 1),
    "stack": lambda x: jnp.stack([x, x + 1], 2),
    "split": lambda x: jnp.split(x * 2, [1, 3], 2),
    "tile": lambda x: jnp.tile(x, (2, 1, 3)),
    "select of three": lambda x: jnp.select([x > 3, x < 0], [x, -x], 0),
    "bits": lambda x: lax.bitcast_convert_type(x, jnp.uint8),
    "bits back": lambda x: lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, jnp.uint16), jnp.float32
    ),
    "argmax": lambda x: (jnp.argmax(x % 5, 1), jnp.argmin(x % 7, 2), jnp.argmax(x)),
    "precision": lambda x: lax.reduce_precision(x / 3, 5, 10),
    "complex": lambda x: jnp.conj(lax.complex(x, x[::-1])) * (2 + 1j),
    "empty": lambda x: (x[:0].sum(), x[:0].max(0, initial=-1), x[:, :0] * 2, x[:0] @ x[0].T),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_python_runs_programs_as_numpy_does(name):
    vn.numba.compare_jax_and_py(MOVES[name], [X])
    vn.numba.compare_numba_and_py(MOVES[name], [X], native=False)


def test_native_code_agrees_with_the_references():
    vn.numba.compare_numba_and_py(lambda x: [move(x) for move in MOVES.values()], [X])


def _source(f, *args):
    return compiler.source_of(trace(f, args)[0]).text


def test_a_chain_is_one_loop_over_all_entries():
    f = lambda x: jnp.tanh(x.reshape(6, 4) * 2 + 1).reshape(3, 8)
    text = _source(f, X)
    assert text.count("for ") == 1
    assert "range(24)" in text


def test_a_reduction_fuses_its_operand():
    text = _source(lambda x: (jnp.exp(x) * 2).sum(-1), X)
    assert text.count("def ") == 2
    assert text.count("for ") == 2


def test_values_shared_by_a_row_are_computed_once_per_row():
    text = _source(lambda x, y: jnp.exp(y)[:, None] * x, X[0], X[0, :, 0])
    inner = text[text.index("for j") : text.index("def program")]
    assert "exp" not in inner


def test_values_shared_by_columns_are_computed_before():
    text = _source(lambda x, y: jnp.exp(y) * x, X[0], X[0, 0])
    assert text.count("def ") == 3


def test_work_memory_is_reused():
    def f(x):
        for _ in range(6):
            x = x @ x
        return x

    x = np.eye(16, dtype=np.float32)
    source = compiler.source_of(trace(f, (x,))[0])
    assert source.work_nbytes == 2 * x.nbytes
