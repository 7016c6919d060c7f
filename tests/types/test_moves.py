"""Moves of data return only values that the constructor of the type accepts.

`test_dtypes.py` compares the results of moves with dense results.
"""

import inspect
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.every_type import EVERY_TYPE, T, plain, value

import veneer as vn
from veneer._core.primitives.leaves import dense_shape_of
from veneer._core.trace import ImplicitTracer
from veneer.testing.programs import moves


@pytest.fixture(autouse=True)
def _check_all_values(monkeypatch):
    """Run `__post_init__` of each implicit value in a program, including intermediate values."""
    init = ImplicitTracer.__init__

    def checked(self, trace, value):
        check(value)
        init(self, trace, value)

    monkeypatch.setattr(ImplicitTracer, "__init__", checked)


def check(value):
    parts = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, vn.Value) and x is not value)
    for part in parts:
        if isinstance(part, vn.Value):
            check(part)
    if isinstance(value, vn.Value) and hasattr(value, "__post_init__"):
        value.__post_init__()


def test_fixture_finds_values_that_a_constructor_rejects():
    rows = value("NMSparse, along -1")
    with pytest.raises(ValueError, match="NMSparse takes values"):
        check(jax.tree.map(lambda leaf: leaf[0], rows))


#: These types have no dense array. They raise for operations that they do not support.
REFUSING = (T.Masked, T.Named, T.Quantity)


@pytest.mark.parametrize("name", EVERY_TYPE)
def test_moves_of_a_batch_agree_with_the_dense_array(name):
    w = value(name, (2,))
    results, refused = jax.eval_shape(_moved, w, plain(w))
    for move, (out, expected) in results.items():
        assert jax.eval_shape(plain, out) == expected, move
    _check_refused(w, refused)


def _moved(w, x):
    """Run each move on an implicit and a dense array, and return results and errors."""
    results, refused = {}, {}
    for move, program in moves(w.shape):
        if move.startswith("filled") and isinstance(w, T.Masked):
            continue  # entries outside are invalid, not NaN
        try:
            results[move] = vn.implicit(program)(w), program(x)
        except (TypeError, ValueError) as error:
            refused[move] = _Message(str(error))
        else:
            jax.tree.map(check, results[move][0], is_leaf=lambda x: isinstance(x, vn.Value))
    return results, refused


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Message:
    text: str


def _check_refused(w, refused):
    named = type(w).__name__ if isinstance(w, REFUSING) else "nothing is refused"
    assert all(named in message.text for message in refused.values()), refused


def test_rows_of_a_sparse_matrix_are_dense():
    m = jax.random.normal(jax.random.key(0), (8, 8))
    w = T.NMSparse.prune(m, 2, 4, -1)
    np.testing.assert_array_equal(vn.implicit(lambda w: w[0] * 2)(w), 2 * plain(w)[0])


class Matrices(vn.ImplicitArray):
    """A type whose constructor accepts arrays with two axes only."""

    x: jax.Array

    def __post_init__(self):
        if self.x.ndim != 2 or 0 in self.x.shape:
            raise ValueError("two axes")

    def materialise(self):
        return self.x + 0


@pytest.mark.parametrize(("move", "program"), list(moves((4, 4))))
def test_values_that_the_constructor_rejects_materialize(move, program):
    w = Matrices(jnp.arange(16.0).reshape(4, 4))
    out = vn.implicit(program)(w)
    jax.tree.map(np.testing.assert_array_equal, plain(out), program(w.x))
    jax.tree.map(check, out, is_leaf=lambda x: isinstance(x, vn.Value))


def test_constructor_that_reads_entries_keeps_the_type():
    class Sorted(vn.ImplicitArray):
        x: jax.Array  # [n]

        def __post_init__(self):
            assert (np.diff(np.asarray(self.x)) >= 0).all()

        def materialise(self):
            return self.x + 0

    out = vn.implicit(lambda w: w[1:])(Sorted(jnp.arange(3.0)))
    assert isinstance(out, Sorted)


class OwnConstructor(vn.ImplicitArray):
    """The same type with an `__init__` whose arguments are not the fields."""

    x: jax.Array
    count: int = vn.static()

    def __init__(self, rows):
        self.__dict__.update(x=jnp.stack(rows), count=len(rows[0]))

    __post_init__ = Matrices.__post_init__
    materialise = Matrices.materialise


@pytest.mark.parametrize(("move", "program"), list(moves((4, 4))))
def test_post_init_is_checked_if_init_is_custom(move, program):
    w = OwnConstructor(list(jnp.arange(16.0).reshape(4, 4)))
    out = vn.implicit(program)(w)
    jax.tree.map(np.testing.assert_array_equal, plain(out), program(w.x))
    jax.tree.map(check, out, is_leaf=lambda x: isinstance(x, vn.Value))


def test_post_init_runs_after_a_custom_init():
    with pytest.raises(ValueError, match="two axes"):
        OwnConstructor([jnp.ones((2, 2))])

    class Sub(OwnConstructor):
        y: jax.Array

        def __init__(self, rows, y):
            super().__init__(rows)
            self.__dict__["y"] = y

        def __post_init__(self):
            super().__post_init__()
            assert self.y is not None  # `__post_init__` runs after `__init__`

    Sub([jnp.ones(2)], jnp.ones(2))


def test_check_init_of_equinox_modules_runs():
    import equinox as eqx

    class Module(eqx.Module, vn.ImplicitArray):
        x: jax.Array

        def __check_init__(self):
            if self.x.ndim != 2:
                raise ValueError("two axes")

        def materialise(self):
            return self.x + 0

    w = Module(jnp.arange(16.0).reshape(4, 4))
    np.testing.assert_array_equal(vn.implicit(lambda w: w[0])(w), w.x[0])  # dense, and no error


def _classes(cls):
    for sub in cls.__subclasses__():
        yield sub
        yield from _classes(sub)


def test_types_with_a_custom_init_define_post_init():
    assert vn.quant.QArray.__module__.startswith("veneer.")  # imports the lazy package
    made = [
        c for c in _classes(vn.Value) if c.__module__.startswith("veneer.") and c._is_own_dataclass
    ]
    own = [c for c in made if inspect.unwrap(c.__init__).__code__.co_filename != "<string>"]
    assert {"QArray", "ActivationQuantized", "Toeplitz", "Lazy"} <= {c.__name__ for c in own}
    constructor = lambda c: inspect.unwrap(c.__init__)  # QCache inherits both from QArray
    assert [c for c in own if c.__post_init__.__module__ != constructor(c).__module__] == []


@pytest.mark.parametrize("name", ["QArray", "ActivationQuantized"])
def test_block_with_mismatched_scales_has_no_shape(name):
    q = vn.quant.quantize(jnp.ones((4, 6)), "int8", channelwise_axes=(1,))
    if name == "ActivationQuantized":
        q = vn.quant.ActivationQuantized(jnp.ones((4, 6)), jnp.ones((1, 6)), qtype="int8")
    codes, scale = map(jax.typeof, jax.tree.leaves(q))
    block = jax.ShapeDtypeStruct((4, 3), codes.dtype)
    of = lambda *shape: jax.ShapeDtypeStruct(shape, scale.dtype)
    assert dense_shape_of(jax.tree.structure(q), (block, of(1, 3))) == (4, 3)
    assert dense_shape_of(jax.tree.structure(q), (block, of(1, 2))) is None
