"""Turning high types on and off, in one thread or in all of them."""

import threading
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

import veneer as vn
import veneer.hijax  # registers its own classes with JAX before `state` is called
from veneer._jax import hijax as jax_hijax
from veneer._jax.primitives import find_primitive

pytestmark = pytest.mark.usefixtures("mode_off")

RAISES_OUTSIDE_IMPLICIT = pytest.raises(RuntimeError, match=r"outside vn\.implicit")


def state():
    """Return copies of all JAX and Veneer attributes that the mode patches."""
    modules = ["api", "pjit", "core", "custom_derivatives", "ad_checkpoint", "loops"]
    modules += ["conditionals", "dtypes", "jax_shard_map", "stages"]
    owners = [getattr(jax_hijax, name) for name in modules]
    owners += [jax_hijax.core.Primitive, jax_hijax.FlatTree, vn.ImplicitArray, vn.Value]
    owners += [jax_hijax.stages.Traced, type(find_primitive("shard_map"))]
    owners += [find_primitive("remat"), find_primitive("dot_general")]
    return [dict(vars(owner)) for owner in owners], dict(jax_hijax.core.pytype_aval_mappings)


def test_uninstall_restores_jax(x, weight):
    before = state()
    vn.hijax.install()
    try:
        assert state() != before
        vn.hijax.install()  # has no effect the second time
        jax.jit(jnp.dot)(x, weight.value)
        with vn.hijax.enabled():
            pass
        assert state() != before
    finally:
        vn.hijax.uninstall()
    assert state() == before
    vn.hijax.uninstall()  # has no effect the second time
    with vn.hijax.enabled(), vn.hijax.enabled():
        assert state() != before
    assert state() == before


def test_an_implicit_array_raises_without_the_mode(x, weight, agree):
    program = lambda x, w: jnp.dot(x, w)
    with RAISES_OUTSIDE_IMPLICIT:
        program(x, weight.value)
    with vn.hijax.enabled():
        agree(jax.jit(program)(x, weight.value), x @ weight.dense)
        with vn.hijax.enabled():
            agree(program(x, weight.value), x @ weight.dense)
        agree(program(x, weight.value), x @ weight.dense)
    for function in (program, jax.jit(program)):
        with RAISES_OUTSIDE_IMPLICIT:
            function(x, weight.value)  # nor does a cached call run


def test_enabled_affects_only_its_thread(x, weight):
    results = []

    def run_in_thread():
        results.append(vn.hijax.is_enabled())
        with RAISES_OUTSIDE_IMPLICIT:
            jnp.dot(x, weight.value)
        results.append("raised")

    with vn.hijax.enabled():
        thread = threading.Thread(target=run_in_thread)
        thread.start()
        thread.join()
        assert vn.hijax.is_enabled()
    assert results == [False, "raised"]


def test_install_affects_all_threads(x, weight, agree):
    results = []
    vn.hijax.install()
    try:
        thread = threading.Thread(target=lambda: results.append(jnp.dot(x, weight.value)))
        thread.start()
        thread.join()
    finally:
        vn.hijax.uninstall()
    agree(results[0], x @ weight.dense)


def test_an_enabled_block_outlasts_uninstall(x, weight, agree):
    vn.hijax.install()
    with vn.hijax.enabled():
        vn.hijax.uninstall()
        agree(jnp.dot(x, weight.value), x @ weight.dense)
    assert not vn.hijax.is_enabled()


def test_an_error_in_an_enabled_block_restores_jax():
    before = state()
    with pytest.raises(ZeroDivisionError), vn.hijax.enabled():
        1 / 0  # noqa: B018
    assert state() == before


def test_primitives_defined_in_the_mode_take_implicit_arrays(weight, agree):
    with vn.hijax.enabled():
        twice_p = Primitive("twice")
        twice_p.def_impl(lambda x: 2 * x)
        twice_p.def_abstract_eval(lambda x: x.update())
        jax.interpreters.mlir.register_lowering(
            twice_p, jax.interpreters.mlir.lower_fun(lambda x: 2 * x, multiple_results=False)
        )
        jaxpr = jax.make_jaxpr(lambda w: twice_p.bind(w))(weight.value)
        assert "twice" in str(jaxpr)
        agree(jax.jit(twice_p.bind)(weight.value), 2 * weight.dense)
        agree(twice_p.bind(weight.value), 2 * weight.dense)


def test_dense_programs_have_unchanged_jaxprs(x):
    program = jax.grad(lambda x: jnp.sum(jax.nn.gelu(x) @ x.T))
    before = str(jax.make_jaxpr(program)(x))
    with vn.hijax.enabled():
        assert str(jax.make_jaxpr(program)(x)) == before


def test_implicit_works_in_the_mode(x, weight, agree):
    with vn.hijax.enabled():
        agree(vn.implicit(jnp.dot)(x, weight.value), x @ weight.dense)
        agree(jax.jit(vn.implicit(partial(jnp.einsum, "ij,jk")))(x, weight.value), x @ weight.dense)
        agree(x @ weight.value, x @ weight.dense)
