"""Loops and branches that change static fields, by `metadata_is_meaning`."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import arrays
from support.every_type import EVERY_TYPE, T, value

import veneer as vn

A = arrays.array(np.arange(1.0, 17).reshape(4, 4))
LORA = T.LoraArray(arrays.normal(4, 4), arrays.normal(4, 2), arrays.normal(2, 4), scale=0.5)
ORDER = arrays.array([[2, 0, 1, 3]])


def nm_sparse(n, m, axis):
    return T.NMSparse.prune(A, n, m, axis)


#: For each type and static field, two values that differ in the field but not in shape and dtype.
STORAGE = arrays.OnDemand(
    {
        ("Triangular", "lower"): lambda: (T.Triangular(A), T.Triangular(A, lower=False)),
        ("Triangular", "unit_diagonal"): lambda: (
            T.Triangular(A),
            T.Triangular(A, unit_diagonal=True),
        ),
        ("Banded", "lower"): lambda: (T.Banded(A[:2], 1, 0), T.Banded(A[:3], 2, 0)),
        ("Banded", "upper"): lambda: (T.Banded(A[:2], 0, 1), T.Banded(A[:3], 0, 2)),
        ("Symmetric", "positive_definite"): lambda: (
            T.Symmetric.from_dense(A),
            T.Symmetric.from_dense(A, positive_definite=True),
        ),
        ("LoraArray", "scale"): lambda: (
            LORA,
            dataclasses.replace(LORA, scale=2.0),
        ),
        ("LoraArray", "normed"): lambda: (
            T.LoraArray(LORA.w, LORA.a, LORA.b, arrays.ones((1, 4))),
            T.LoraArray(LORA.w, LORA.a, LORA.b, arrays.ones((4, 1)), normed="out"),
        ),
        ("LoraArray", "dropped"): lambda: (
            LORA,
            dataclasses.replace(LORA, dropped="out"),
        ),
        ("SparseArray", "sparse_shape"): lambda: (
            T.SparseArray.from_dense(A),
            T.SparseArray.from_dense(A, n_batch=1),
        ),
        ("SparseArray", "unique_indices"): lambda: (
            T.SparseArray.from_dense(A),
            dataclasses.replace(T.SparseArray.from_dense(A), unique_indices=False),
        ),
        ("NMSparse", "n"): lambda: (nm_sparse(1, 4, -1), nm_sparse(2, 4, -1)),
        ("NMSparse", "m"): lambda: (nm_sparse(1, 2, -1), nm_sparse(1, 4, -1)),
        ("NMSparse", "axis"): lambda: (nm_sparse(2, 4, -1), nm_sparse(2, 4, -2)),
        ("Permuted", "axis"): lambda: (T.Permuted(A, ORDER), T.Permuted(A, ORDER.T, -2)),
        ("Rotated", "axes"): lambda: (T.Rotated(A), T.Rotated(A, (-1,))),
        ("Constant", "trailing"): lambda: (
            T.Constant(2.0, (4, 4)),
            T.Constant(arrays.ones(4), (4,)),
        ),
        ("Lazy", "function"): lambda: (T.Lazy(jnp.sin, A), T.Lazy(jnp.cos, A)),
    }
)

#: Pairs that raise, because the dense array does not contain the field.
MEANING = {
    ("Named", "names"): (T.Named(A, ("a", "b")), T.Named(A, ("a", "c"))),
    ("Quantity", "unit"): (T.Quantity(A, "m"), T.Quantity(A, "s")),
}

#: Fields that do not differ between values of the same shape, dtype and meaning, with the reason.
NEITHER = {
    ("Permutation", "dtype"): "the dtype of the dense array",
    ("PRNGKey", "impl"): "part of the dtype of the dense array",
    ("LoraArray", "dropout"): "has no dense array",
    ("LoraArray", "in_ndim"): "only with more than two axes",
    ("LoraArray", "out_ndim"): "only with more than two axes",
    ("Lazy", "output"): "only for functions with several results",
}

PROGRAMS = {
    "cond": lambda a, b: lax.cond(jnp.array(False), lambda a, b: a, lambda a, b: b, a, b),
    "fori_loop": lambda a, b: lax.fori_loop(0, 3, lambda i, c: b, a),
    "while_loop": lambda a, b: lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, b), (0, a))[
        1
    ],
    "scan": lambda a, b: lax.scan(lambda c, _: (b, None), a, None, length=2)[0],
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("field", STORAGE, ids=".".join)
def test_changed_storage_materializes_visibly(field, program):
    one, other = STORAGE[field]
    events = []
    run = vn.implicit(PROGRAMS[program], on_materialise=events.append)
    out = run(one, other)
    np.testing.assert_allclose(out, vn.materialise(other), rtol=1e-6)
    assert events
    assert not isinstance(out, vn.Value)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("field", MEANING, ids=".".join)
def test_changed_meaning_raises(field, program):
    with pytest.raises(TypeError, match="metadata differs, and would be lost"):
        vn.implicit(PROGRAMS[program])(*MEANING[field])


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", sorted(set(EVERY_TYPE) - {"Lazy"}))  # a loop materializes `Lazy`
def test_equal_static_fields_keep_the_type(name, program):
    w = value(name)
    out = jax.eval_shape(vn.implicit(PROGRAMS[program], on_materialise="error"), w, w)
    assert jax.tree.structure(out) == jax.tree.structure(w)


def test_different_generators_raise_as_for_dense_keys():
    one, other = (T.PRNGKey(jax.random.key(0, impl=impl)) for impl in ("threefry2x32", "rbg"))
    with pytest.raises(TypeError, match=r"key<fry>.*key<rbg>|key<rbg>.*key<fry>|impl='rbg'"):
        vn.implicit(PROGRAMS["scan"])(one, other)


def test_carry_whose_triangle_or_bands_change():
    turned = vn.implicit(lambda a: lax.fori_loop(0, 3, lambda i, c: c.T, a))
    np.testing.assert_array_equal(turned(T.Triangular(A)), jnp.tril(A).T)
    powers = vn.implicit(lambda a: lax.fori_loop(0, 2, lambda i, c: c @ a, a))
    band = T.Banded(A[:2], 1, 0)
    dense = vn.materialise(band)
    np.testing.assert_allclose(powers(band), dense @ dense @ dense, rtol=1e-5)


DOCS = Path(__file__).parents[2] / "docs" / "loops_and_metadata.md"
KINDS = {name: getattr(T, name) for name in T.__all__ if isinstance(getattr(T, name), type)}


@pytest.mark.parametrize("name", KINDS)
def test_each_static_field_is_in_a_table(name):
    fields = dataclasses.fields(KINDS[name])
    static = {(name, f.name) for f in fields if f.metadata.get("static")}
    decided = {of for of in (*STORAGE, *MEANING, *NEITHER) if of[0] == name}
    assert static == decided
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith(f"| `{name}` |")]
    assert len(rows) == bool(static)
    for row in rows:
        assert all(f"`{field}`" in row for _, field in static)
        assert KINDS[name].metadata_is_meaning == ("they are meaning" in _sentence(row))


def _sentence(row):
    return f"they are {row.split('|')[3].strip()}"
