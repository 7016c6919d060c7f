"""Batch axes can be added, removed and moved without code in the type or a dense array."""

import jax
import jax.numpy as jnp
import pytest
from support.array_types import Diagonal, Metres, Normed, Tagged, lora
from support.claims import Claim, claims

import veneer as vn
from veneer._core.leaf_axes import LeafAxis

stack = lambda draw: Diagonal(draw(3, 2, draw.n))  # [..., 3, 2, n, n]
loras = lambda draw: lora(draw.key, (*draw.batch, 3, 4, 4))
index = lambda draw: jnp.broadcast_to(1, draw.batch)
indices = lambda draw: jnp.broadcast_to(jnp.array([2, 0, 2, 1]), (*draw.batch, 4))

F32 = {"dtypes": (), "sizes": (1,)}
taken = {
    "one": lambda w: w[1],
    "one of the second axis": lambda w: w[:, 1],
    "some": lambda w: w[::2, :1],
    "backwards": lambda w: w[::-1],
    "a new axis": lambda w: w[None],
    "broadcast": lambda w: jnp.broadcast_to(w, (2, *w.shape)),
    "squeezed": lambda w: jnp.squeeze(w[1:2], 0),
    "concatenated": lambda w: jnp.concatenate([w, w[:1]]),
    "stacked": lambda w: jnp.stack([w, w]),
    "split": lambda w: jnp.split(w, [1, 2]),
    "unstacked": lambda w: list(w),
    "turned": lambda w: w.transpose(1, 0, 2, 3),
    "merged": lambda w: w.reshape(6, *w.shape[2:]),
    "chosen": lambda w: jnp.where(jnp.array(True), w, w[::-1]),
}
test_diagonal, test_sizes = claims(
    {name: Claim(run, (stack,), kept=Diagonal, **F32) for name, run in taken.items()}
    | {
        "at an index": Claim(lambda w, i: w[i], (stack, index), kept=Diagonal, **F32),
        "at indices": Claim(
            lambda w, i: w.at[i].get(mode="clip"), (stack, indices), kept=Diagonal, **F32
        ),
    }
)


@pytest.mark.parametrize("name", ["one", "some", "a new axis", "concatenated", "stacked"])
def test_axes_of_a_type_with_metadata_can_change(name):
    w = loras(type("Draw", (), {"key": jax.random.key(0), "batch": ()}))
    run = (lambda w: w[1:]) if name == "some" else taken[name]
    out = vn.implicit(run, on_materialise="error")(w)
    assert isinstance(out, type(w))
    assert jnp.allclose(vn.materialise(out), run(vn.materialise(w)))


def test_the_axes_of_a_matrix_are_not_batch_axes():
    d = Diagonal(jnp.ones((3, 3)))  # [3, 3, 3]: of one size all
    for run in (lambda d: d[:, 0], lambda d: d.transpose(1, 0, 2), lambda d: d.reshape(9, 3)):
        out = vn.implicit(run)(d)
        assert not isinstance(out, vn.Value)
        assert jnp.array_equal(out, run(vn.materialise(d)))


def test_a_type_with_metadata_is_sliced_only_by_its_rule():
    # Its metadata might name the axes.
    assert not isinstance(vn.implicit(lambda x: x[0])(Metres(jnp.ones((2, 2)))), Metres)
    with pytest.raises(RuntimeError, match="refuses"):
        vn.implicit(lambda x: x[0])(Tagged(jnp.ones((2, 2)), "a"))


def test_entries_that_depend_on_each_other_are_not_split():
    x = Normed(jnp.arange(6.0).reshape(2, 3))
    assert jnp.allclose(vn.implicit(lambda x: x[0])(x), vn.materialise(x)[0])


def test_indices_out_of_bounds_are_filled_as_in_dense_arrays():
    d = Diagonal(jnp.ones((2, 3)))
    out = vn.implicit(lambda d, i: jnp.take(d, i, axis=0))(d, jnp.array([0, 5]))
    assert jnp.isnan(out[1]).all()


def test_leaves_of_different_dtypes_are_not_joined():
    of = lambda dtype: vn.types.Permutation(jnp.array([[0, 1]], dtype))
    out = vn.implicit(lambda x, y: jnp.concatenate([x, y]))(of("int32"), of("int8"))
    assert jnp.array_equal(vn.materialise(out), jnp.stack([jnp.eye(2)] * 2))


def test_a_split_is_one_equation_per_leaf():
    d = Diagonal(jnp.ones((4, 3)))  # [4, 3, 3]
    jaxpr = jax.make_jaxpr(vn.implicit(lambda d: jnp.split(d, 2)))(d)
    assert str(jaxpr).count(" = split[") == 1
    assert " slice[" not in str(jaxpr)


def test_a_field_can_have_any_name():
    class Marked(vn.ImplicitArray):
        x: jax.Array
        moved: jax.Array
        movable: jax.Array

        def materialise(self):
            return self.x + self.moved * self.movable

    x = Marked(jnp.ones((2, 3)), jnp.ones((2, 3)), jnp.ones((2, 3)))
    assert vn.materialise(vn.implicit(lambda x: x.T[0])(x)).tolist() == [2.0, 2.0]


class Outer(vn.ImplicitArray):
    """A type with leaf axes and nothing else. Each leaf has only one of the two axes."""

    u: jax.Array  # [m]
    v: jax.Array  # [n]

    def materialise(self):
        return self.u[:, None] * self.v

    def leaf_axes(self):
        return [[LeafAxis(-2)], [LeafAxis(-1)]]


@pytest.mark.parametrize(
    "move", [lambda x: x.T, lambda x: x[1], lambda x: x[:, ::-1], lambda x: x[1:], jnp.ravel]
)
def test_leaves_without_the_moved_axis_stay_correct(move):
    x = Outer(jnp.arange(3.0), jnp.arange(1.0, 4.0))
    assert jnp.array_equal(vn.materialise(vn.implicit(move)(x)), move(x.materialise()))


@pytest.mark.parametrize("qtype", ["int4", "uint2", "int1", "ternary", "nf4", "int8"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_values_that_share_a_byte_are_reversed(qtype, size):
    q = vn.quant.quantize(jnp.array([-1.0, 7.0, 3.0])[:size], qtype)
    assert jnp.array_equal(vn.materialise(vn.implicit(jnp.flip)(q)), jnp.flip(vn.materialise(q)))


def test_concatenating_empty_parts_changes_nothing():
    q = vn.quant.quantize(jnp.eye(4), "int4", channelwise_axes=[0])
    out = vn.implicit(lambda q: jnp.concatenate([q[:0], q, q[:0]]))(q)
    assert isinstance(out, vn.quant.QArray)
    assert jnp.array_equal(vn.materialise(out), vn.materialise(q))


def test_index_guarantees_are_dropped_for_shared_leaves():
    w = lora(jax.random.key(0), (4, 6))
    numbers = jax.lax.GatherDimensionNumbers((1, 2), (), (0, 1))
    guarantees = {"unique_indices": True, "indices_are_sorted": True, "mode": "clip"}
    at = jnp.array([[0, 0], [0, 1], [2, 2]])
    program = lambda w: jax.lax.gather(w, at, numbers, (2, 3), **guarantees)
    jaxpr = str(jax.make_jaxpr(vn.implicit(program))(w))
    assert jaxpr.count("unique_indices=True") == 1  # only for `w`, not for `a` and `b`
    assert jaxpr.count("indices_are_sorted=True") == 1
