"""Error messages for mistakes in a type or a rule, with the names that its author gave."""

import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError
from support import arrays
from support.array_types import MAKERS, Tagged

import veneer as vn

W = MAKERS["lora"](arrays.key(0))
X = arrays.ones(3)


class Held(vn.ImplicitArray):
    x: object  # [n]
    note: object = vn.static(default=None)

    def materialise(self):
        return self.x


def typed(materialise=lambda self: self.x, **methods):
    """An instance of a type with these methods."""
    return type("Odd", (Held,), {"materialise": materialise, **methods})(X)


class Unregistered:
    pass


class Sized(vn.ImplicitArray):
    """Its fields that no array is are declared as if they were leaves."""

    x: jax.Array
    n: int = 3
    flag: bool = True
    axes: tuple = (0,)


def sized(materialise):
    return type("Odd", (Sized,), {"materialise": materialise})(X)


MISTAKES = {
    "a size that is no metadata": (
        lambda: sized(lambda self: jnp.zeros(self.n)),
        r"Odd\.n is .*, a leaf.* n: \.\.\. = vn\.static\(\)",
    ),
    "a flag that is no metadata": (
        lambda: sized(lambda self: self.x if self.flag else -self.x),
        r"Odd\.(n|flag) is .*, a leaf.* = vn\.static\(\)",
    ),
    "axes that are no metadata": (
        lambda: sized(lambda self: self.x.sum(self.axes)),
        r"Odd\.(n|axes\[0\]) is .*, a leaf.* = vn\.static\(\)",
    ),
    "a field that is no array": (lambda: Held(Unregistered()), r"Held\.x is <.*Unregistered"),
    "a field that is a string": (lambda: Held("x"), r"Held\.x is 'x'.*vn\.static\(\)"),
    "a static list": (lambda: Held(X, [1]), r"Held\.note is static.*\[1\] is a list.*tuple"),
    "a static array": (lambda: Held(X, np.ones(2)), r"Held\.note is static.*ndarray"),
    "a dense list": (
        lambda: typed(lambda self: [1]),
        r"Odd\.materialise\(\) must return an array, not \[1\]",
    ),
    "no dense array": (
        lambda: typed(lambda self: None),
        r"Odd\.materialise\(\) must return an array, not None",
    ),
    "itself": (lambda: typed(lambda self: self), r"Odd\.materialise\(\) returns itself"),
    "an aval that is none": (
        lambda: typed(aval=lambda self: (3,)),
        r"Odd\.aval\(\) must return a jax\.core\.ShapedArray.* not \(3,\)",
    ),
    "another shape than the aval's": (
        lambda: typed(aval=lambda self: jax.core.ShapedArray((4,), jnp.float32)),
        r"Odd\.materialise\(\) returns f32\[3\], but its aval\(\) is f32\[4\]",
    ),
    "another dtype than the aval's": (
        lambda: typed(aval=lambda self: jax.core.ShapedArray((3,), jnp.float16)),
        r"returns f32\[3\], but its aval\(\) is f16\[3\]",
    ),
}

USES = {
    "operator": lambda w: w + 1,
    "implicit": lambda w: vn.implicit(jnp.cosh)(w),
    "jit of implicit": lambda w: jax.jit(vn.implicit(lambda x: jnp.cosh(w) + x))(1.0),
    "implicit of jit": lambda w: vn.implicit(jax.jit(lambda w: jnp.cosh(w)))(w),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_class_raises(mistake, use):
    make, message = MISTAKES[mistake]
    with pytest.raises(TypeError, match=re.compile(message, re.DOTALL)):
        USES[use](make())


class Pair(vn.ImplicitArray):
    """Two vectors. Its check computes the shape, which fails if they do not fit."""

    x: jax.Array
    y: jax.Array

    def __post_init__(self):
        self.aval()

    def materialise(self):
        if self.x.shape != self.y.shape:
            raise ValueError("x and y differ")
        return self.x * self.y


def test_an_error_in_aval_is_reported_once():
    with pytest.raises(ValueError, match="x and y differ") as caught:
        Pair(X, X[:2])
    assert str(caught.value) == "x and y differ"
    cut = jax.tree.map(lambda x: x[: round(float(x[0]))], Pair(2 + 0 * X, 1 + 0 * X))
    with pytest.raises(ValueError, match="changed each leaf of this Pair separately") as caught:
        cut.aval()
    assert str(caught.value).count("x and y differ") == 1


RESULTS = {
    "another shape": (lambda x: x.x[:2], r"returns f32\[2\], where cosh gives f32\[3\]"),
    "another dtype": (lambda x: x.x.astype(jnp.float16), r"returns f16\[3\], where cosh gives f32"),
    "a value of another shape": (lambda x: Held(x.x[None]), r"returns f32\[1,3\], where cosh"),
    "a string": (lambda x: "x", r"returns 'x'\. It must return one array, like cosh"),
    "a list": (lambda x: [x.x], r"returns \[.*\. It must return one array, like cosh"),
    "nothing": (
        lambda x: None,
        r"returns None\. It must return one array, like cosh\. .* NotImplemented",
    ),
}


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_wrong_result_of_a_rule_raises(result, wrap):
    give, message = RESULTS[result]
    odd = typed()

    @vn.register("cosh")
    def _(x: type(odd), **params):
        return give(x)

    where = rf"the rule at .*test_user_errors\.py:\d+ for cosh\(Odd:f32\[3\]\) {message}"
    with pytest.raises(TypeError, match=where):
        vn.implicit(wrap(jnp.cosh))(odd)


def test_a_wrong_number_of_results_raises():
    odd = typed()

    @vn.register("split")
    def _(x: type(odd), **params):
        return [x.x[:1]]

    with pytest.raises(TypeError, match=r"returns f32\[1\], where split gives f32\[1\], f32\[2\]"):
        vn.implicit(lambda x: jax.lax.split(x, (1, 2)))(odd)


class Endless:
    """Has no end to those who iterate over it, as an object that clamps its indices has none."""

    def __repr__(self):
        return "Endless"

    def __getitem__(self, index):
        raise AssertionError("it is iterated over")

    __iter__ = __len__ = __getitem__


class EndlessArray(Endless, vn.ImplicitArray):
    x: jax.Array  # [n]

    def materialise(self):
        return self.x


def register_endless(kind, result):
    @vn.register(["split", "cosh"])
    def _(x: kind, **params):
        return result


def endless_default(result):
    return typed(default=staticmethod(lambda primitive, values, params: result))


RESULTS_OF_SEVERAL = [Endless(), EndlessArray(X), X]


@pytest.mark.parametrize("result", RESULTS_OF_SEVERAL, ids=["object", "value", "array"])
@pytest.mark.parametrize("by", ["rule", "default"])
def test_a_result_that_is_not_a_list_raises(by, result):
    odd = typed() if by == "rule" else endless_default(result)
    if by == "rule":
        register_endless(type(odd), result)
    with pytest.raises(
        TypeError, match=r"for split\(Odd.* It must return a sequence of arrays, like split"
    ):
        vn.implicit(lambda x: jax.lax.split(x, (1, 2)))(odd)


@pytest.mark.parametrize("by", ["rule", "default"])
def test_a_result_that_is_not_an_array_raises(by):
    odd = typed() if by == "rule" else endless_default(Endless())
    if by == "rule":
        register_endless(type(odd), Endless())
    with pytest.raises(
        TypeError, match=r"for cosh\(Odd.* returns Endless\. It must return one array, like cosh"
    ):
        vn.implicit(jnp.cosh)(odd)


METHODS = {
    "materialise": jnp.sin,
    "aval": jnp.sin,
    "leaf_axes": lambda x: jnp.flip(x) + x[:2].sum(),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_wrong_result_of_a_method_is_rejected(method):
    odd = typed(**{method: lambda self: Endless()})
    with pytest.raises(TypeError, match=rf"Odd\.{method}"):
        vn.implicit(METHODS[method])(odd)


MESH = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
PLACED = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec("x"))


@pytest.mark.parametrize("axes", [Endless(), [Endless()], [[Endless()]], 3, [[0]]], ids=str)
@pytest.mark.parametrize("program", ["moved", "placed"])
def test_invalid_leaf_axes_raise(axes, program):
    odd = typed(leaf_axes=lambda self: axes, materialise=lambda self: self.x + 0)  # no label
    place = lambda x: jax.lax.with_sharding_constraint(x, PLACED)
    with pytest.raises(
        TypeError, match=r"Odd\.leaf_axes returns .* vn.LeafAxis or None for each axis"
    ):
        vn.implicit({"moved": jnp.flip, "placed": place}[program])(odd)


def test_an_endless_sequence_is_one_operand():
    w = EndlessArray(X)
    for program in (jnp.sin, lambda x: jnp.where(x > 1, x, 0) + jnp.ones(3), jnp.flip, jnp.sum):
        np.testing.assert_allclose(vn.implicit(program)(w), program(X), rtol=1e-6)
        np.testing.assert_allclose(jax.jit(vn.implicit(program))(w), program(X), rtol=1e-6)


def test_a_wrong_result_of_a_default_raises():
    odd = typed(default=staticmethod(lambda primitive, values, params: jnp.zeros(5)))
    with pytest.raises(TypeError, match=r"the default of Odd for cosh\(Odd.* f32\[5\], where cosh"):
        vn.implicit(jnp.cosh)(odd)


def test_a_rule_without_parameters_raises():
    odd = typed()

    @vn.register("tanh")
    def _(x: type(odd)):
        return x

    with pytest.raises(TypeError, match=r"rule at .*cannot be called for tanh\(Odd.*accuracy"):
        vn.implicit(jnp.tanh)(odd)


def test_implicit_rejects_objects_that_are_not_functions():
    with pytest.raises((TypeError, TypeCheckError), match="not an object of type int"):
        vn.implicit(3)


def test_implicit_names_the_types_of_parameters_it_is_given():
    params = {"w": vn.quant.quantize(jnp.ones((64, 64)), "int8"), "b": jnp.ones(3)}
    with pytest.raises((TypeError, TypeCheckError)) as caught:
        vn.implicit(params)
    message = str(caught.value)
    assert (
        "not an object of type dict (leaves: Array, QArray). Call vn.implicit(model)(params, x)"
        in message
    )
    assert "vn.materialise(params)" in message
    assert len(message) < 200


def test_using_a_leaked_value_raises():
    leaked = []
    vn.implicit(lambda w: leaked.append(w))(W)
    for use in (lambda w: w + 1, jnp.sin, vn.implicit(jnp.sin), jax.jit(jnp.sin)):
        with pytest.raises(jax.errors.UnexpectedTracerError, match=r"float32\[6,6\]"):
            use(leaked[0])


def test_metadata_2_and_2_0_give_different_dtypes():
    times = lambda self: self.x * self.note
    odd = type("Odd", (Held,), {"materialise": times})
    counts = jnp.arange(3)
    assert odd(counts, 2).dtype == jnp.int32
    assert odd(counts, 2.0).dtype == jnp.float32


def test_the_aval_follows_the_precision_in_force():
    odd = typed(lambda self: jnp.zeros(3) + self.x)
    assert odd.dtype == jnp.float32
    with jax.enable_x64(True):
        assert odd.dtype == jnp.float64
    assert odd.dtype == jnp.float32


def test_the_error_of_a_type_that_stays_implicit_is_shown():
    with pytest.raises(RuntimeError, match="refuses to lose its label 'm'"):
        vn.implicit(jnp.cosh)(Tagged(X, "m"))


@pytest.mark.parametrize("number", [np.ones(3, np.float32), np.float64(1)], ids=["array", "scalar"])
def test_numpy_results_of_rules_become_jax_arrays(number):
    odd = typed(aval=lambda self: jax.core.ShapedArray(np.shape(number), jnp.float32))

    @vn.register("cosh")
    def _(x: type(odd), **params):
        return number

    out = vn.implicit(lambda x: jnp.cosh(x).reshape(-1).at[0].set(3.0))(odd)
    assert (out[0], out.dtype) == (3.0, jnp.float32)


def test_metadata_2_and_2_0_are_compiled_separately():
    odd = type("Odd", (Held,), {"materialise": lambda self: self.x * self.note})
    counts = jnp.arange(3)
    for note, dtype in ((2, jnp.int32), (2.0, jnp.float32), (2, jnp.int32)):
        assert (odd(counts, note) + 1).dtype == dtype
        assert vn.implicit(lambda x: jnp.add(x, 1))(odd(counts, note)).dtype == dtype


def test_staged_programs_follow_the_configuration():
    squared = type("Odd", (Held,), {"materialise": lambda self: self.x @ self.x})
    program = jax.jit(lambda w: w * 2)
    held = jax.make_jaxpr(program)(jnp.ones((3, 3)))
    run = vn.implicit(jax.extend.core.jaxpr_as_fun(held))
    with jax.default_matmul_precision("highest"):
        high = str(jax.make_jaxpr(run)(squared(jnp.ones((3, 3)))))
    assert "HIGHEST" in high
    assert "HIGHEST" not in str(jax.make_jaxpr(run)(squared(jnp.ones((3, 3)))))


def test_materialise_must_not_return_its_own_class():
    with pytest.raises(TypeError, match=r"Odd\.materialise\(\) returns itself"):
        vn.materialise(typed(lambda self: type(self)(self.x)))


def test_a_rule_for_dense_operands_only_raises():
    for wrong in (lambda x, y, **params: x, lambda *xs, **params: xs, lambda **params: 0):
        names = [n for n in wrong.__code__.co_varnames if n != "params"]
        wrong.__annotations__ = dict.fromkeys(names, vn.ArrayLike)
        with pytest.raises(TypeError, match=r"takes only dense operands.* Annotate that operand"):
            vn.register("cosh")(wrong)


def test_a_rule_without_annotations_raises():
    for wrong in (lambda x, **params: x, lambda *xs, **params: xs):
        with pytest.raises(
            TypeError, match=r"operand 'xs?' has no annotation.*every implicit type"
        ):
            vn.register("cosh")(wrong)

    def second(x, y, **params):
        return x

    second.__annotations__ = {"x": vn.ArrayLike}
    with pytest.raises(TypeError, match="operand 'y' has no annotation"):
        vn.register("atan2")(second)
    second.__annotations__ = {"x": type(typed())}  # `y` is anything beside it
    vn.register("atan2")(second)


def rule_of(module, kind):
    def rule(x, **params):
        return x

    rule.__annotations__, rule.__module__ = {"x": kind}, module
    return rule


def test_a_second_rule_from_another_module_raises():
    kind = type(typed())
    first, second = (rule_of(module, kind) for module in ("one", "two"))
    vn.register("cosh")(first)
    message = r"cosh already has a rule for these .*\n.*, of one\n.*, of two\n.* higher precedence"
    with pytest.raises(ValueError, match=message):
        vn.register("cosh")(second)
    vn.register("cosh")(rule_of("one", kind))  # a cell of a notebook, run again
    vn.register("cosh", precedence=1)(second)
    vn.register("cosh")(rule_of("two", type(typed())))  # of another type


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_rule_that_calls_itself_raises(wrap):
    kind = type(typed())

    @vn.register("cosh")
    def _(x: kind, **params):
        return vn.implicit(jnp.cosh)(x)

    message = r"test_user_errors\.py:\d+ for cosh calls itself without an end.* leaves"
    with pytest.raises(RecursionError, match=message):
        wrap(vn.implicit(jnp.cosh))(kind(X))


def test_rules_that_call_each_other_raise():
    kind = type(typed())

    @vn.register("cosh")
    def _(x: kind, **params):
        return vn.implicit(jnp.sinh)(x)

    @vn.register("sinh")
    def _(x: kind, **params):
        return vn.implicit(jnp.cosh)(x)

    with pytest.raises(RecursionError, match=r"for (sinh|cosh) calls itself without an end"):
        vn.implicit(jnp.cosh)(kind(X))


def test_an_ordinary_recursion_error_is_unchanged():
    def endless():
        return endless()

    kind = type(typed())

    @vn.register("cosh")
    def _(x: kind, **params):
        return endless()

    with pytest.raises(RecursionError, match="maximum recursion depth"):
        vn.implicit(jnp.cosh)(kind(X))


@pytest.mark.parametrize("name", ["no_such_primitive", "matmul"])
def test_an_unknown_primitive_name_is_rejected(name):
    with pytest.raises(ValueError, match=rf"no primitive named '{name}' .*jax\.make_jaxpr"):
        vn.register(name)


@pytest.mark.parametrize("wrong", [3, lambda x: x])
def test_objects_without_rules_are_rejected(wrong):
    with pytest.raises((TypeError, TypeCheckError)):
        vn.register(wrong)


def test_implicit_can_be_a_decorator_with_arguments():
    @vn.implicit(on_materialise="error")
    def model(w, x):
        """Compute something."""
        return jnp.cosh(w) + x

    assert model.__doc__ == "Compute something."
    with pytest.raises(vn.MaterialiseError, match="cosh"):
        model(typed(), 1.0)
    with pytest.raises((ValueError, TypeCheckError), match=r"on_materialise must be|eror"):
        vn.implicit(on_materialise="eror")
    only_first = vn.implicit(filter_spec=lambda v: False)(lambda w: w)
    assert type(only_first(typed())).__name__ == "Odd"


CODES, SCALE = arrays.full((4, 4), 127, np.int8), arrays.full((1, 1), 1 / 127)
WEIGHTS = {"w": vn.quant.QArray(CODES, SCALE, qtype="int8")}


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_the_error_outside_implicit_names_the_remedy(transform):
    f = transform(lambda x: jnp.dot(x, WEIGHTS["w"]))
    with pytest.raises(
        RuntimeError,
        match=r"JAX functions cannot take QArray:f32\[4,4\] outside vn\.implicit\. Wrap",
    ):
        f(jnp.ones((2, 4)))
    assert jnp.allclose(jax.jit(vn.implicit(f))(jnp.ones((2, 4))), 4, rtol=0.01)
