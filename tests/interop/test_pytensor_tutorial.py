"""PyTensor's tutorial on new implementations of an `Op`, followed by its names."""

import jax
import jax.numpy as jnp
import numba
import numpy as np
import pytensor.tensor as pt
import pytest
from pytensor.graph.basic import Apply
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.tensor.extra_ops import CumOp

try:
    from pytensor.conditional.op import ifelse
except ImportError:  # PyTensor before 3.3
    from pytensor.ifelse import ifelse

from veneer.interop import pytensor as interop
from veneer.interop.pytensor import (
    compare_jax_and_py,
    compare_numba_and_py,
    jax_funcify,
    numba_funcify,
)

COMPARE = [compare_jax_and_py, compare_numba_and_py]
A = np.arange(9, dtype=np.float32).reshape(3, 3)


class Running(CumOp):
    """An `Op` that PyTensor has, as a class of our own."""


class Scaled(Op):
    """An `Op` with two results and a property."""

    __props__ = ("by",)

    def __init__(self, by):
        self.by = by

    def make_node(self, x):
        return Apply(self, [x], [x.type(), pt.scalar(dtype=x.dtype)])

    def perform(self, node, inputs, output_storage):
        output_storage[0][0] = inputs[0] * inputs[0].dtype.type(self.by)
        output_storage[1][0] = np.asarray(inputs[0].sum())


@pytest.mark.parametrize("compare", COMPARE)
@pytest.mark.parametrize("axis", [0, 1, -1, None])
def test_cumulative_sums_and_products_agree(compare, axis):
    a = pt.matrix("a", dtype="float32")
    outputs = [pt.cumsum(a, axis=axis), pt.cumprod(a + 1, axis=axis)]
    compare(FunctionGraph([a], outputs), [A])


@pytest.mark.parametrize("compare", COMPARE)
@pytest.mark.parametrize("condition", [0, 1])
def test_branches_agree(compare, condition):
    c, a = pt.iscalar("c"), pt.matrix("a", dtype="float32")
    outputs = [*ifelse(c, [a, a + 1], [a * 2, a]), ifelse(c, a - 1, a * 3)]
    compare(FunctionGraph([c, a], outputs), [np.int32(condition), A])


@pytest.mark.parametrize("compare", COMPARE)
def test_eyes_of_known_size_agree(compare):
    a = pt.matrix("a", dtype="float32")
    outputs = [a @ pt.eye(3, 4, 1, dtype="float32"), pt.eye(*a.shape, dtype="float32")]
    compare(FunctionGraph([a], outputs), [A])


def test_eyes_of_dynamic_size_are_rejected_in_jax():
    n = pt.iscalar("n")
    graph = FunctionGraph([n], [pt.eye(n)])
    with pytest.raises(TypeError, match=r"input n \(.*determines a shape"):
        compare_jax_and_py(graph, [np.int32(3)])
    compare_numba_and_py(graph, [np.int32(3)])


def test_a_jax_implementation_is_registered_by_class():
    @jax_funcify.register(Scaled)
    def jax_funcify_scaled(op, **kwargs):
        by = op.by

        def scaled(x, by=by):
            return x * by, jnp.sum(x)

        return scaled

    a = pt.matrix("a", dtype="float32")
    run, results = compare_jax_and_py(FunctionGraph([a], Scaled(3)(a)), [A])
    assert all(isinstance(x, jax.Array) for x in results)
    np.testing.assert_array_equal(run(A)[0], A * 3)


@pytest.mark.parametrize("wrap", [numba.njit, lambda f: f], ids=["njit", "plain"])
def test_a_numba_implementation_is_registered_by_class(wrap):
    @numba_funcify.register(Scaled)
    def numba_funcify_scaled(op, node, **kwargs):
        by = np.dtype(node.inputs[0].dtype).type(op.by)

        def scaled(x):
            return x * by, np.asarray(x.sum())

        return wrap(scaled)

    a = pt.matrix("a", dtype="float32")
    compare_numba_and_py(FunctionGraph([a], Scaled(3)(a)), [A])


def test_a_registration_replaces_one_of_pytensor():
    a = pt.matrix("a", dtype="float32")
    graph = FunctionGraph([a], [Running(0, "add")(a)])
    compare_numba_and_py(graph, [A])

    @numba_funcify.register(Running)
    def wrong(op, **kwargs):
        return numba.njit(lambda x: x + np.float32(1))

    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare_numba_and_py(graph, [A])


def test_an_unsupported_mode_is_rejected_as_the_rule_says():
    class OnlySums(CumOp):
        pass

    @jax_funcify.register(OnlySums)
    def jax_funcify_only_sums(op, **kwargs):
        def run(x):
            if op.mode == "add":
                return jnp.cumsum(x, axis=op.axis)
            raise NotImplementedError("no products")

        return run

    a = pt.matrix("a", dtype="float32")
    compare_jax_and_py(FunctionGraph([a], [OnlySums(0, "add")(a)]), [A])
    with pytest.raises(NotImplementedError, match="no products"):
        compare_jax_and_py(FunctionGraph([a], [OnlySums(0, "mul")(a)]), [A])


@pytest.mark.parametrize("compare", COMPARE)
def test_inputs_outputs_and_values_can_be_separate(compare):
    a = pt.matrix("a", dtype="float32")
    compare([a], [pt.tanh(a)], [A])
    compare([a], pt.tanh(a), [A], assert_fn=np.testing.assert_array_almost_equal)
    with pytest.raises(TypeError, match="the inputs, the outputs and the values"):
        compare([a], [A])
    with pytest.raises(TypeError, match="give only their values"):
        compare(FunctionGraph([a], [pt.tanh(a)]), [A], [A])


def test_a_difference_is_reported():
    a = pt.matrix("a", dtype="float32")
    graph = FunctionGraph([a], [a + 1])
    fail = lambda x, y: pytest.fail("compared")
    with pytest.raises(pytest.fail.Exception, match="compared"):
        compare_jax_and_py(graph, [A], assert_fn=fail)


def test_comparisons_do_not_change_the_graph():
    a = pt.matrix("a", dtype="float32")
    graph = FunctionGraph([a], [pt.log(1 + a)])
    before = [node.op for node in graph.toposort()]
    for compare in COMPARE:
        compare(graph, [A])
    assert [node.op for node in graph.toposort()] == before


def test_numba_funcify_has_the_signature_of_pytensor():
    a = pt.matrix("a", dtype="float32")
    node = pt.cumsum(a, axis=0).owner
    function = numba_funcify(node.op, node=node)
    np.testing.assert_array_equal(numba.njit(lambda x: function(x))(A), A.cumsum(0))
    assert set(interop.__all__) >= {"jax_funcify", "numba_funcify"}
