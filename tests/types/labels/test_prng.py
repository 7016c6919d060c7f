"""Tests of `PRNGKey` against typed keys: draws, splits and movements of keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.claims import Claim, claims

import veneer as vn
from veneer.types.prng import PRNGKey


def key(*shape):
    """A maker of keys of a shape."""

    def make(draw):
        keys = jax.random.key(7)
        return PRNGKey(
            jax.random.split(keys, (*draw.batch, *shape)) if draw.batch + shape else keys
        )

    return make


def scale(draw):
    return draw(3)


CLAIMS = {
    "normal": Claim(lambda k, x: x * jax.random.normal(k, (3,), x.dtype), [key(), scale], sizes=()),
    "split, fold in and draw": Claim(
        lambda k, x: x * jax.random.uniform(jax.random.split(jax.random.fold_in(k, 3))[1], (3,)),
        [key(), scale],
        sizes=(),
        dtypes=(),
    ),
}

test_under, test_over_sizes_and_dtypes = claims(CLAIMS)

DRAWN = {
    "bits": lambda k: jax.random.bits(k, (4,)),
    "gamma": lambda k: jax.random.gamma(k, 2.0, (4,)),
    "categorical": lambda k: jax.random.categorical(k, jnp.arange(3.0), shape=(4,)),
    "permutation": lambda k: jax.random.permutation(k, 5),
    "dropout": lambda k: jnp.where(jax.random.bernoulli(k, 0.5, (9,)), 1.0, 0.0),
    "integers behind": jax.random.key_data,
    "equal": lambda k: k == jax.random.fold_in(k, 0),
    "a loop": lambda k: (
        jax.lax.fori_loop(0, 3, lambda i, k: jax.random.split(k)[0], k) == jax.random.split(k)[0]
    ),
}

MOVED = {
    "split": lambda ks: jax.random.split(ks[0, 0], 3),
    "fold in": lambda ks: jax.random.fold_in(ks[1, 1], 3),
    "clone": lambda ks: jax.random.clone(ks[1]),
    "index": lambda ks: ks[jnp.array([1, 0])],
    "item": lambda ks: jax.lax.dynamic_index_in_dim(ks, jnp.array(1)),
    "reversed": lambda ks: ks[::-1],
    "reshape": lambda ks: ks.reshape(2, 1, 2),
    "new axis and transpose": lambda ks: ks[:, None, 0].T,
    "join": lambda ks: jnp.concatenate([ks, ks]),
    "stack": lambda ks: jnp.stack([ks[0], ks[1]]),
    "choose": lambda ks: jnp.where(jnp.array([True, False]), ks[0], ks[1]),
    "update": lambda ks: ks.at[0].set(ks[1]),
    "branch": lambda ks: jax.lax.cond(True, lambda k: k[0], lambda k: k[1], ks),
    "scan": lambda ks: jax.lax.scan(lambda c, k: (c, jax.random.fold_in(k[0], c)), 0, ks)[1],
}

TYPED = arrays.key(3)


def strict(f):
    return vn.implicit(f, on_materialise="error")


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_programs_draw_the_same_numbers(name, wrap):
    out = wrap(strict(DRAWN[name]))(PRNGKey(TYPED))
    assert isinstance(out, jax.Array)
    assert (out == DRAWN[name](TYPED)).all()


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_movements_of_keys_return_keys(name, wrap):
    typed = jax.random.split(TYPED, (2, 2))
    out = wrap(strict(MOVED[name]))(PRNGKey(typed))
    assert isinstance(out, PRNGKey)
    expected = MOVED[name](typed)
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    assert (vn.materialise(out) == expected).all()


def test_vmap_maps_over_keys():
    typed = jax.random.split(TYPED, 3)
    draw = lambda k: jax.random.normal(k, (2,))
    expected = jax.vmap(draw)(typed)
    assert (jax.vmap(strict(draw))(PRNGKey(typed)) == expected).all()
    assert (strict(jax.vmap(draw))(PRNGKey(typed)) == expected).all()


def test_split_and_fold_in_match_jax():
    a, b = PRNGKey(TYPED).split()
    assert vn.materialise(b) == jax.random.split(TYPED)[1]
    assert a.split((2, 3)).shape == (2, 3)
    folded = PRNGKey(TYPED).fold_in(jnp.array(5))
    assert vn.materialise(folded) == jax.random.fold_in(TYPED, 5)


def test_methods_apply_to_each_key_of_an_array():
    keys = PRNGKey(TYPED).split(3)
    typed = jax.random.split(TYPED, 3)
    split = jax.vmap(lambda k: jax.random.split(k, 4))(typed)
    assert (vn.materialise(keys.split(4)) == split).all()
    folded = jax.vmap(lambda k: jax.random.fold_in(k, 1))(typed)
    assert (vn.materialise(keys.fold_in(1)) == folded).all()


def test_the_leaf_is_an_array_of_integers():
    keys = PRNGKey(jax.random.split(TYPED, 3))
    (leaf,) = jax.tree.leaves(keys)
    saved = np.asarray(leaf)
    assert (saved.dtype, saved.shape, keys.nbytes) == (np.uint32, (3, 2), 24)
    again = PRNGKey(saved, keys.impl)
    assert (vn.materialise(again) == vn.materialise(keys)).all()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_the_generator_is_kept(impl):
    typed = jax.random.key(1, impl=impl)
    keys = PRNGKey(typed)
    assert (keys.impl, keys.dtype) == (impl, typed.dtype)
    assert strict(jax.random.normal)(keys) == jax.random.normal(typed)
    assert keys.split().impl == impl


def test_branches_with_keys_of_two_generators_raise():
    one, other = PRNGKey(jax.random.key(0)), PRNGKey(jax.random.key(0, impl="rbg"))
    with pytest.raises(TypeError):
        vn.implicit(lambda a, b: jax.lax.cond(True, lambda: a, lambda: b))(one, other)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((np.zeros(2, "uint32"),), TypeError, "integers and their generator"),
        ((TYPED, "rbg"), TypeError, "typed keys already have a generator"),
        ((np.zeros(3, "uint32"), "threefry2x32"), TypeError, r"end with \(2,\)"),
        ((np.zeros(2), "threefry2x32"), TypeError, "uint32"),
        ((np.zeros(2, "uint32"), "dice"), ValueError, "dice"),
        ((np.array(3, "uint32"), "threefry2x32"), ValueError, "too few axes"),
        ((3, "threefry2x32"), TypeError, "data"),
    ],
)
def test_invalid_arguments_raise(arguments, error, match):
    with pytest.raises(error, match=match) as caught:
        PRNGKey(*arguments)
    assert "changed by itself" not in str(caught.value)


def test_repr_shows_the_generator():
    assert repr(PRNGKey(TYPED)) == "PRNGKey(data=u32[2], impl='threefry2x32')"
