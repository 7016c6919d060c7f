"""The documentation: programs on its pages run and print the output on the page."""

import contextlib
import doctest
import inspect
import re
from pathlib import Path

import jax
import jax.experimental.compute_on
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback, pallas
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import arrays
from support.array_types import Tagged, assert_close, lora

import veneer as vn
import veneer.types  # whose rules are not those of a page
from veneer._core import rules
from veneer._core.nesting import pack
from veneer._core.primitives import movement
from veneer._core.primitives.leaves import RULES
from veneer._jax.primitives import find_primitive

DOCS = Path(__file__).parent.parent / "docs"
TYPES = sorted(path for path in DOCS.glob("types/*.md") if path.stem != "README")
YOUR_MODEL = sorted(DOCS.glob("your_model/*.md"))
PAGES = [*sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("types/*.md")), *YOUR_MODEL]
TUTORIALS = [
    DOCS / f"{name}.md"
    for name in (
        "your_own_array_type",
        "redispatch",
        "quax",
        "derivatives",
        "loops_and_metadata",
        "what_materialised",
        "training",
        "saving",
        "checkpoints",
        "gpu",
        "sharding",
        "scale",
        "calibration",
        "ptq",
        "quantized_training",
        "cache",
        "formats",
        "performance",
        "numba",
        "hijax",
        "gallery",
    )
]

# A program, and its output if the page shows it.
PROGRAM = re.compile(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", re.DOTALL)
PRINTED = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture
def registry(monkeypatch):
    """Forget the rules that a page registers for our types."""
    table = {primitive: list(of_primitive) for primitive, of_primitive in rules._rules.items()}
    monkeypatch.setattr(rules, "_rules", table)
    yield
    vn.hijax.uninstall()  # where a page had no time to
    for clear in rules._clear_caches:
        clear()


@pytest.mark.slow  # each page runs for several seconds
@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("page", TUTORIALS + YOUR_MODEL + TYPES, ids=lambda page: page.stem)
def test_programs_print_the_output_on_the_page(page, capsys):
    programs = PROGRAM.findall(page.read_text("utf-8"))
    assert any(shown for _, shown in programs)
    names: dict = {"__name__": "example"}
    lines = 0  # so that printed line numbers refer to the joined program
    for program, shown in programs:
        exec(compile("\n" * lines + program, "example.py", "exec"), names)
        printed = capsys.readouterr().out
        example = doctest.Example(program, shown)
        checker = doctest.OutputChecker()
        if not checker.check_output(shown, printed, PRINTED):
            pytest.fail(program + "\n" + checker.output_difference(example, printed, PRINTED))
        lines += program.count("\n") + 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)  # layers[0](x)
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert links or page.stem not in {"README", *(p.stem for p in TUTORIALS + YOUR_MODEL)}
    for link in links:
        assert (page.parent / link).exists(), link


def test_the_index_names_every_page():
    index = (DOCS / "README.md").read_text("utf-8")
    named = {DOCS / link for link in re.findall(r"\]\(([^:)#]+)\)", index)}
    assert named >= {*PAGES} - {*TYPES, DOCS / "README.md"}


def test_every_type_has_a_page_in_the_index():
    index = (DOCS / "types" / "README.md").read_text("utf-8")
    assert all(f"({page.name})" in index for page in TYPES)
    names = {name for name in vn.types.__all__ if isinstance(getattr(vn.types, name), type)}
    assert names
    missing = {name for name in names if f"`{name}" not in index}
    assert not missing


# The reference page: a program for each primitive, and the behavior that the page states.

ROW = re.compile(r"^\| `(.+?)` \| .+? \| (inside|leaf by leaf|dense) \|", re.MULTILINE)
REFERENCE = dict(ROW.findall((DOCS / "reference_primitives.md").read_text("utf-8")))

OLD = jax.__version_info__ < (0, 12)
KEY = arrays.key(0)
LORA = lora(KEY)
X = arrays.array(np.linspace(-1.0, 1.0, 24).reshape(4, 6))
SQUARE = jax.ShapeDtypeStruct((6, 6), jnp.float32)
AUTO, EXPLICIT = (
    jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    for kind in (AxisType.Auto, AxisType.Explicit)
)


def matmul(w):
    return jnp.tanh(X @ w)


def bind(name):
    return lambda *operands, **params: find_primitive(name).bind(*operands, **params)


def jaxpr_of_matmul():
    return jax.make_jaxpr(matmul)(jnp.ones((6, 6)))


def closed_call(w):
    params = find_primitive("closed_call").get_bind_params({"call_jaxpr": jaxpr_of_matmul()})
    return bind("closed_call")(w, **params)


custom_jvp = jax.custom_jvp(matmul)
custom_jvp.defjvp(lambda primals, tangents: (custom_jvp(*primals), X @ tangents[0]))

custom_vjp = jax.custom_vjp(matmul)
custom_vjp.defvjp(lambda w: (custom_vjp(w), None), lambda _, ct: (X.T @ ct,))

remat_opt = jax.custom_vjp(matmul)
remat_opt.defvjp(lambda w: (matmul(w), None), lambda _, ct: (X.T @ ct,), optimize_remat=True)


@jax.custom_batching.custom_vmap
def custom_vmap(w):
    return matmul(w)


custom_vmap.def_vmap(lambda axis_size, in_batched, w: (matmul(w), True))


def compute_on(w):
    module = jax.experimental.compute_on
    decorator = getattr(module, "compute_on2", module.compute_on)  # JAX < 0.12: another name
    space = jax.memory.Space.Device
    return decorator(matmul, compute_type="device_host", out_memory_spaces=space)(w)


def custom_root(w):
    f = lambda x: x @ w + 9 * x - 1
    solve = lambda f, x: jax.lax.fori_loop(0, 3, lambda i, x: x - f(x) / 9, x)
    tangent_solve = lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y)
    return jax.lax.custom_root(f, jnp.zeros(6), solve, tangent_solve)


def custom_linear_solve(w):
    return jax.lax.custom_linear_solve(lambda x: x @ w, X, lambda matvec, b: b - matvec(b))


def linear_call(w):
    transpose = lambda w, ct: ct @ w.T
    return jax.custom_derivatives.linear_call(lambda w, x: x @ w, transpose, w, X)


def copied_by_pallas(x):
    def kernel(source, target):
        target[...] = source[...]

    return pallas.pallas_call(kernel, out_shape=SQUARE, interpret=True)(x)


@custom_partitioning
def partitioned(x):
    return jnp.sin(x)


partitioned.def_partition(
    partition=lambda *_: pytest.fail("on one device there is nothing to partition"),
    infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
    sharding_rule="i j -> i j",
)


def sharded(function, in_specs, out_specs):
    return jax.shard_map(function, mesh=AUTO, in_specs=in_specs, out_specs=out_specs)


def after(effect):
    """Return the operand, after an operation on it that has no result."""
    return lambda x: (effect(x), x)[1]


PROGRAMS = {
    "jit": jax.jit(matmul),
    "remat2": jax.checkpoint(matmul),
    "composite": jax.lax.composite(matmul, name="test.matmul"),
    "eval_jaxpr": lambda w: bind("eval_jaxpr")(
        w, **{"jaxpr" if OLD else "call_jaxpr": jaxpr_of_matmul()}
    ),
    "custom_vmap_call": custom_vmap,
    "compute_on": compute_on,
    "closed_call": closed_call,
    "cond": lambda w: jax.lax.cond(True, matmul, lambda w: -matmul(w), w),
    "while": lambda w: jax.lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, X)
    ),
    "scan": lambda w: jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), c), X, None, length=2),
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
    "remat_opt": lambda w: jax.vjp(remat_opt, w)[0],
    "custom_linear_solve": custom_linear_solve,
    "custom_root": custom_root,
    "call_hi_primitive": lambda w: jnp.searchsorted(jnp.arange(3.0), w),
    "linear_call": linear_call,
    "shard_map": sharded(matmul, P(), P()),
    "sharding_constraint": lambda x: jax.lax.with_sharding_constraint(
        x, NamedSharding(AUTO, P("x"))
    ),
    "device_put": lambda x: jax.device_put(x, NamedSharding(AUTO, P("x"))),
    "reshard": lambda x: jax.sharding.reshard(x, NamedSharding(EXPLICIT, P("x"))),
    "pvary": sharded(lambda x: jax.lax.pcast(x, "x", to="varying"), P(), P("x")),
    "ppermute": sharded(lambda x: jax.lax.ppermute(x, "x", [(0, 1), (1, 0)]), P(), P("x")),
    "psum": jax.shard_map(
        lambda x: jax.lax.psum(x, "x"), mesh=AUTO, in_specs=P(), out_specs=P(), check_vma=False
    ),
    "copy": bind("copy"),
    "stop_gradient": jax.lax.stop_gradient,
    "name": lambda x: checkpoint_name(x, "x"),
    "optimization_barrier": jax.lax.optimization_barrier,
    "xla_metadata_value": lambda x: set_xla_metadata(x, key="value"),
    "dce_sink": after(jax.lax.dce_sink),
    "layout_constraint": lambda x: with_layout_constraint(x, Layout((1, 0))),
    "reduce_precision": lambda x: jax.lax.reduce_precision(x, 8, 23),
    "pure_callback": lambda x: jax.pure_callback(np.asarray, SQUARE, x),
    "io_callback": lambda x: io_callback(np.asarray, SQUARE, x),
    "debug_callback": lambda x: jax.debug.callback(np.asarray, x),
    "debug_print": after(lambda x: jax.debug.print("{}", x)),
    "pallas_call": copied_by_pallas,
    "ffi_call": lambda x: jax.ffi.ffi_call("of no library", SQUARE)(x),
    "custom_partitioning": partitioned,
    "new_ref": lambda x: jax.new_ref(x)[...],
    "reduce": lambda x: jax.lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (0,)),
    "reduce_window_sum": lambda x: jax.lax.reduce_window(
        x, 0.0, jax.lax.add, (2, 2), (1, 1), "VALID"
    ),
    "scatter-add": lambda x: jnp.zeros((8, 6)).at[jnp.arange(6)].add(x),
}


def primitives_of_this_jax():
    """Return the names of all primitives, without aliases and without `custom_root`."""
    for name in PROGRAMS:
        with contextlib.suppress(ValueError):
            if name == "custom_root" or find_primitive(name).name == name:
                yield name


@pytest.fixture(params=primitives_of_this_jax())
def primitive(request):
    return request.param


TAGGED = Tagged(arrays.array(np.arange(36.0).reshape(6, 6)), "kg")
INT8 = arrays.quantized("int8", 6, 6)


def test_the_jaxpr_of_a_program_has_its_primitive(primitive):
    if primitive in ("custom_root", "call_hi_primitive") or (primitive == "eval_jaxpr" and OLD):
        pytest.skip("a jaxpr shows it by another name")
    program = jax.make_jaxpr(PROGRAMS[primitive])(vn.materialise(LORA))
    assert re.search(rf"(= |let |^ *){re.escape(primitive)}(\[| )", str(program), re.MULTILINE)


def test_an_implicit_operand_behaves_as_the_reference_says(primitive):
    program, treatment = PROGRAMS[primitive], REFERENCE[primitive]
    if treatment == "leaf by leaf":
        strict = vn.implicit(program, on_materialise="error")
        tagged, quantized = strict(TAGGED), strict(INT8)
        assert (type(tagged), tagged.label) == (Tagged, "kg")
        assert_close(tagged.x, program(TAGGED.x))
        assert type(quantized) is vn.quant.QArray
        assert_close(quantized, program(vn.materialise(INT8)))
        return
    report = vn.explain(program)(LORA)
    if primitive == "call_hi_primitive":  # what is inside has no rules
        assert "eq" in {event.primitive for event in report.events}
        assert primitive not in {event.primitive for event in report.events}
    elif treatment == "inside":
        assert {event.primitive for event in report.events} == {"dot_general"}
        assert not report.materialised
    elif treatment == "dense":
        assert [event.primitive for event in report.materialised] == [primitive]
    if primitive != "ffi_call":  # there is nothing to call
        assert_close(jax.jit(vn.implicit(program))(LORA), jax.jit(program)(vn.materialise(LORA)))


@jax.custom_jvp
def jvp_identity(w):
    return w


jvp_identity.defjvp(lambda primals, tangents: (jvp_identity(*primals), tangents[0]))

vjp_identity = jax.custom_vjp(lambda w: w)
vjp_identity.defvjp(lambda w: (w, None), lambda _, ct: (ct,))

# Programs that materialize the operand, although other programs with the primitive do not.
OTHERWISE = {
    "cond": lambda w: jax.lax.cond(True, lambda w: w, lambda w: jnp.ones((6, 6)), w),
    "while": lambda w: jax.lax.while_loop(lambda w: True, lambda w: jnp.ones((6, 6)), w),
    "scan": lambda w: jax.lax.scan(lambda w, _: (jnp.ones((6, 6)), None), w, None, length=2),
    "custom_jvp_call": jax.jit(jvp_identity),
    "custom_vjp_call": jax.jit(vjp_identity),
    "custom_linear_solve": lambda b: jax.lax.custom_linear_solve(
        lambda x: x * 2, b, lambda matvec, b: b / 2
    ),
    "linear_call": lambda x: jax.custom_derivatives.linear_call(
        lambda _, x: X @ x, lambda _, ct: X.T @ ct, (), x
    ),
    "call_hi_primitive": lambda x: jnp.ldexp(x, 2),
    "shard_map": sharded(lambda w: w @ w.T, P("x"), P("x")),
    "reshard": lambda x: jax.sharding.reshard(x, NamedSharding(EXPLICIT, P("x"))),
    "reduce_precision": lambda x: jax.lax.reduce_precision(x, 8, 2),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_exceptions_of_the_reference_materialize_the_operand(name):
    if name == "call_hi_primitive" and OLD:
        pytest.skip("a primitive of JAX 0.12")
    assert REFERENCE[name] != "dense"
    assert name in {event.primitive for event in vn.explain(OTHERWISE[name])(LORA).materialised}


def test_the_reference_lists_every_primitive_of_the_core():
    known = {p.name for p, of_p in rules._rules.items() if any(is_of_the_core(r) for r in of_p)}
    assert known - {pack.name} - RULES.keys() <= REFERENCE.keys()  # the first is ours
    assert REFERENCE.keys() == PROGRAMS.keys()


def is_of_the_core(rule):
    # `RULES` also swaps the operands of a user's rule.
    module = inspect.unwrap(rule.function).__module__
    elsewhere = (movement.__name__, rules.__name__)
    return module.startswith("veneer._core.") and module not in elsewhere


def test_the_reference_names_every_primitive_that_moves_leaves():
    text = (DOCS / "reference_primitives.md").read_text("utf-8")
    assert all(f"`{name}`" in text for name in RULES)
