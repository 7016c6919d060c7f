"""The mode: on and off again, in one thread or in all, and primitives defined meanwhile."""

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

REFUSED = pytest.raises(RuntimeError, match=r"outside vn\.implicit")


def state():
    """All that the mode changes, as it is."""
    modules = ["api", "pjit", "core", "custom_derivatives", "ad_checkpoint", "loops"]
    modules += ["conditionals", "dtypes", "jax_shard_map", "stages"]
    owners = [getattr(jax_hijax, name) for name in modules]
    owners += [jax_hijax.core.Primitive, jax_hijax.FlatTree, vn.ImplicitArray, vn.Value]
    owners += [jax_hijax.stages.Traced, type(find_primitive("shard_map"))]
    owners += [find_primitive("remat"), find_primitive("dot_general")]
    return [dict(vars(owner)) for owner in owners], dict(jax_hijax.core.pytype_aval_mappings)


def test_uninstall_restores_everything(x, weight):
    before = state()
    vn.hijax.install()
    try:
        assert state() != before
        vn.hijax.install()  # as once
        jax.jit(jnp.dot)(x, weight.value)
        with vn.hijax.enabled():
            pass
        assert state() != before
    finally:
        vn.hijax.uninstall()
    assert state() == before
    vn.hijax.uninstall()  # does nothing
    with vn.hijax.enabled(), vn.hijax.enabled():
        assert state() != before
    assert state() == before


def test_without_the_mode_an_implicit_array_is_refused(x, weight, agree):
    program = lambda x, w: jnp.dot(x, w)
    with REFUSED:
        program(x, weight.value)
    with vn.hijax.enabled():
        agree(jax.jit(program)(x, weight.value), x @ weight.dense)
        with vn.hijax.enabled():
            agree(program(x, weight.value), x @ weight.dense)
        agree(program(x, weight.value), x @ weight.dense)
    for function in (program, jax.jit(program)):
        with REFUSED:
            function(x, weight.value)  # and is not found in a cache either


def test_a_block_is_for_one_thread(x, weight):
    found = []

    def other():
        found.append(vn.hijax.is_enabled())
        with REFUSED:
            jnp.dot(x, weight.value)
        found.append("refused")

    with vn.hijax.enabled():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert vn.hijax.is_enabled()
    assert found == [False, "refused"]


def test_installed_it_is_for_all_threads(x, weight, agree):
    found = []
    vn.hijax.install()
    try:
        thread = threading.Thread(target=lambda: found.append(jnp.dot(x, weight.value)))
        thread.start()
        thread.join()
    finally:
        vn.hijax.uninstall()
    agree(found[0], x @ weight.dense)


def test_a_block_outlasts_uninstall(x, weight, agree):
    vn.hijax.install()
    with vn.hijax.enabled():
        vn.hijax.uninstall()
        agree(jnp.dot(x, weight.value), x @ weight.dense)
    assert not vn.hijax.is_enabled()


def test_an_error_ends_the_mode():
    before = state()
    with pytest.raises(ZeroDivisionError), vn.hijax.enabled():
        1 / 0  # noqa: B018
    assert state() == before


def test_primitives_defined_later_take_implicit_arrays(weight, agree):
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


def test_dense_programs_stay_as_they_are(x):
    program = jax.grad(lambda x: jnp.sum(jax.nn.gelu(x) @ x.T))
    before = str(jax.make_jaxpr(program)(x))
    with vn.hijax.enabled():
        assert str(jax.make_jaxpr(program)(x)) == before


def test_implicit_works_as_ever_in_the_mode(x, weight, agree):
    with vn.hijax.enabled():
        agree(vn.implicit(jnp.dot)(x, weight.value), x @ weight.dense)
        agree(jax.jit(vn.implicit(partial(jnp.einsum, "ij,jk")))(x, weight.value), x @ weight.dense)
        agree(x @ weight.value, x @ weight.dense)
