"""No move gives a value that its own constructor refuses: every type, every rule, every axis.

What moves of matrices give is compared with those of dense arrays in `test_dtypes.py`.
"""

import inspect
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.every_type import EVERY_TYPE, T, plain, value

import veneer as vn
from veneer._core.primitives.leaf_movement import dense_shape_of
from veneer._core.trace import ImplicitTracer
from veneer.testing.programs import moves


@pytest.fixture(autouse=True)
def _constructors_are_asked(monkeypatch):
    """Has the constructor of each value that a program meets, or gives on its way, look at it."""
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


def test_the_check_finds_what_a_constructor_refuses():
    rows = value("NMSparse, along -1")
    with pytest.raises(ValueError, match="NMSparse takes values"):
        check(jax.tree.map(lambda leaf: leaf[0], rows))


#: These have no dense form, and refuse by name what they do not keep.
REFUSING = (T.Masked, T.Named, T.Quantity)


@pytest.mark.parametrize("name", EVERY_TYPE)
def test_moves_of_a_batch(name):
    w = value(name, (2,))
    results, refused = jax.eval_shape(_moved, w, plain(w))
    for move, (out, expected) in results.items():
        assert jax.eval_shape(plain, out) == expected, move
    _check_refused(w, refused)


def _moved(w, x):
    """What each move gives, of an implicit and of a dense array, and what refusals say."""
    results, refused = {}, {}
    for move, program in moves(w.shape):
        if move.startswith("filled") and isinstance(w, T.Masked):
            continue  # what lies outside is not valid there, and no NaN
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
    """Two axes and no more: so says the constructor, and nothing else."""

    x: jax.Array

    def __post_init__(self):
        if self.x.ndim != 2 or 0 in self.x.shape:
            raise ValueError("two axes")

    def materialise(self):
        return self.x + 0


@pytest.mark.parametrize(("move", "program"), list(moves((4, 4))))
def test_a_type_of_which_only_the_constructor_says_what_it_is(move, program):
    w = Matrices(jnp.arange(16.0).reshape(4, 4))
    out = vn.implicit(program)(w)
    jax.tree.map(np.testing.assert_array_equal, plain(out), program(w.x))
    jax.tree.map(check, out, is_leaf=lambda x: isinstance(x, vn.Value))


def test_a_constructor_that_wants_known_entries_refuses_nothing():
    class Sorted(vn.ImplicitArray):
        x: jax.Array  # [n]

        def __post_init__(self):
            assert (np.diff(np.asarray(self.x)) >= 0).all()

        def materialise(self):
            return self.x + 0

    out = vn.implicit(lambda w: w[1:])(Sorted(jnp.arange(3.0)))
    assert isinstance(out, Sorted)


class OwnConstructor(vn.ImplicitArray):
    """The same with a constructor of its own, which takes something else than the fields."""

    x: jax.Array
    count: int = vn.static()

    def __init__(self, rows):
        self.__dict__.update(x=jnp.stack(rows), count=len(rows[0]))

    __post_init__ = Matrices.__post_init__
    materialise = Matrices.materialise


@pytest.mark.parametrize(("move", "program"), list(moves((4, 4))))
def test_a_type_with_a_constructor_of_its_own(move, program):
    w = OwnConstructor(list(jnp.arange(16.0).reshape(4, 4)))
    out = vn.implicit(program)(w)
    jax.tree.map(np.testing.assert_array_equal, plain(out), program(w.x))
    jax.tree.map(check, out, is_leaf=lambda x: isinstance(x, vn.Value))


def test_a_constructor_of_ones_own_is_followed_by_the_check():
    with pytest.raises(ValueError, match="two axes"):
        OwnConstructor([jnp.ones((2, 2))])

    class Sub(OwnConstructor):
        y: jax.Array

        def __init__(self, rows, y):
            super().__init__(rows)
            self.__dict__["y"] = y

        def __post_init__(self):
            super().__post_init__()
            assert self.y is not None  # not asked before it is there

    Sub([jnp.ones(2)], jnp.ones(2))


def test_the_checks_of_equinox_modules_are_asked():
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


def test_every_type_of_ours_with_a_constructor_of_its_own_states_its_checks():
    assert vn.quant.QArray.__module__.startswith("veneer.")  # imports the package, which is lazy
    made = [
        c for c in _classes(vn.Value) if c.__module__.startswith("veneer.") and c._is_own_dataclass
    ]
    own = [c for c in made if inspect.unwrap(c.__init__).__code__.co_filename != "<string>"]
    assert {"QArray", "ActivationQuantized", "Toeplitz", "Lazy"} <= {c.__name__ for c in own}
    constructor = lambda c: inspect.unwrap(c.__init__)  # QCache inherits both from QArray
    assert [c for c in own if c.__post_init__.__module__ != constructor(c).__module__] == []


@pytest.mark.parametrize("name", ["QArray", "ActivationQuantized"])
def test_a_block_with_another_number_of_scales_is_none(name):
    """Such as an outer function, or a rule of a user's, might put together."""
    q = vn.quant.quantize(jnp.ones((4, 6)), "int8", channelwise_axes=(1,))
    if name == "ActivationQuantized":
        q = vn.quant.ActivationQuantized(jnp.ones((4, 6)), jnp.ones((1, 6)), qtype="int8")
    codes, scale = map(jax.typeof, jax.tree.leaves(q))
    block = jax.ShapeDtypeStruct((4, 3), codes.dtype)
    of = lambda *shape: jax.ShapeDtypeStruct(shape, scale.dtype)
    assert dense_shape_of(jax.tree.structure(q), (block, of(1, 3))) == (4, 3)
    assert dense_shape_of(jax.tree.structure(q), (block, of(1, 2))) is None
