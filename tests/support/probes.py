"""Array types that make two mistakes visible: a silent fallback to dense, and lost metadata."""

from collections.abc import Callable

import jax
import numpy as np
from jax.extend.core import Primitive, primitives

import veneer as vn
from support.array_types import lora, quantized
from veneer._jax.primitives import find_primitive


class Opaque(vn.ImplicitArray):
    """An array that cannot be materialized. Every first-order primitive has a rule for it."""

    x: jax.Array  # [...]

    def aval(self) -> jax.core.ShapedArray:
        return jax.typeof(self.x)

    def materialise(self):
        raise RuntimeError("Opaque refuses to be dense")


# These primitives contain programs, or use tokens or references.
HIGHER_ORDER = """
    call_p closed_call_p cond_p custom_jvp_call_p custom_lin_p custom_vjp_call_p jit_p
    linear_solve_p remat_p scan_p while_p after_all_p create_token_p dce_sink_p empty2_p get_p
    swap_p
""".split()

# Public functions of JAX bind these primitives, but no public module lists them.
UNLISTED = """
    cholesky_update lu_pivots_to_permutation ormqr ragged_dot_general random_unwrap random_wrap
    reduce_scatter scaled_dot symmetric_product
""".split()

FIRST_ORDER = {
    p
    for module in (jax.lax, primitives)
    for name, p in vars(module).items()
    if isinstance(p, Primitive) and name not in HIGHER_ORDER
} | {find_primitive(name) for name in UNLISTED}


def bare(x):
    return x.x if isinstance(x, Opaque | Quantity) else x


def _leaf_by_leaf(primitive: Primitive) -> None:
    @vn.register(primitive)
    def _(*operands: Opaque | vn.ArrayLike, **params):
        out = primitive.bind(*map(bare, operands), **primitive.get_bind_params(params))
        return list(map(Opaque, out)) if primitive.multiple_results else Opaque(out)


for _primitive in FIRST_ORDER:
    _leaf_by_leaf(_primitive)


Unit = tuple[tuple[str, float], ...]  # pairs of a base unit and a nonzero exponent, sorted


class Quantity(vn.ImplicitArray):
    """An array with a unit. It cannot be materialized, because that would lose the unit."""

    x: jax.Array  # [...]
    unit: Unit = vn.static()

    def aval(self) -> jax.core.ShapedArray:
        return jax.typeof(self.x)

    def materialise(self):
        raise RuntimeError(f"Quantity refuses to lose its unit {dict(self.unit)}")


def unit(**exponents: float) -> Unit:
    return tuple(sorted((base, float(e)) for base, e in exponents.items() if e))


def unit_of(x) -> Unit:
    return x.unit if isinstance(x, Quantity) else ()


def with_unit(x, unit: Unit):
    """Return a quantity, or the dense array if the unit is empty."""
    return Quantity(x, unit) if unit else x


def product(*powers: tuple[Unit, float]) -> Unit:
    total: dict[str, float] = {}
    for factor, power in powers:
        for base, exponent in factor:
            total[base] = total.get(base, 0.0) + exponent * power
    return unit(**total)


class UnitError(TypeError):
    pass


def _is_zero(x) -> bool:
    """Return whether an operand is known to be zero. Zero is valid in any unit."""
    return not isinstance(x, Quantity | jax.core.Tracer) and not np.any(x)


def agreed(operands) -> Unit:
    units = {unit_of(x) for x in operands if not _is_zero(x)}
    if len(units) > 1:
        raise UnitError(f"units differ: {sorted(map(dict, units), key=str)}")
    return units.pop()


# A function from the operands and parameters of a primitive to the unit of its results.
Law = Callable[..., Unit]
_first: Law = lambda x, *others, **params: unit_of(x)
_all: Law = lambda *operands, **params: agreed(operands)
_product: Law = lambda x, y, **params: product((unit_of(x), 1), (unit_of(y), 1))


def _power(exponent: float) -> Law:
    return lambda x, **params: product((unit_of(x), exponent))


def _comparison(*operands, **params) -> Unit:
    agreed(operands)
    return ()


LAWS: dict[str, Law] = {
    **dict.fromkeys(
        "neg abs copy copy_p real imag conj reshape transpose squeeze broadcast_in_dim slice rev "
        "stop_gradient name convert_element_type reduce_precision tile split unstack gather "
        "dynamic_slice reduce_sum reduce_max reduce_min cumsum cummax cummin psum pmax pmin "
        "all_gather ppermute all_to_all reduce_scatter sharding_constraint".split(),
        _first,
    ),
    **dict.fromkeys(
        "add sub max min rem nextafter concatenate stack pad clamp complex".split(), _all
    ),
    # It adds cotangents. JAX starts their sum over a loop at a dense zero.
    "add_any": lambda x, y: agreed([z for z in (x, y) if isinstance(z, Quantity)]),
    **dict.fromkeys("eq ne lt le gt ge atan2".split(), _comparison),
    **dict.fromkeys("mul dot_general conv_general_dilated".split(), _product),
    "div": lambda x, y, **params: product((unit_of(x), 1), (unit_of(y), -1)),
    "select_n": lambda which, *cases, **params: agreed(cases),
    "dynamic_update_slice": lambda x, update, *starts, **params: agreed([x, update]),
    "scatter-add": lambda x, indices, update, **params: agreed([x, update]),
    "sign": lambda x, **params: (),
    "is_finite": lambda x, **params: (),
    "sqrt": _power(0.5),
    "rsqrt": _power(-0.5),
    "square": _power(2),
    "integer_pow": lambda x, *, y: product((unit_of(x), y)),
}


def _by_law(primitive: Primitive, law: Law) -> None:
    @vn.register(primitive)
    def _(*operands: Quantity | vn.ArrayLike, **params):
        unit = law(*operands, **params)
        out = primitive.bind(*map(bare, operands), **params)
        if primitive.multiple_results:
            return [with_unit(x, unit) for x in out]
        return with_unit(out, unit)


def _one_by_one(primitive: Primitive) -> None:
    @vn.register(primitive)
    def _(*operands: Quantity | vn.ArrayLike, **params):
        out = primitive.bind(*map(bare, operands), **params)
        return [with_unit(x, unit_of(y)) for x, y in zip(out, operands, strict=True)]


for _primitive in FIRST_ORDER:
    if _primitive.name in LAWS:
        _by_law(_primitive, LAWS[_primitive.name])
    elif _primitive.name in ("optimization_barrier", "device_put"):
        _one_by_one(_primitive)


class DoublyScaled(vn.ImplicitArray):
    """Codes with scales that are quantized too."""

    codes: jax.Array  # int8[..., K, N]
    scale: vn.ImplicitArray  # [..., 1, N]

    def materialise(self):
        return self.codes * vn.materialise(self.scale)


def doubly_scaled(key: jax.Array, shape: tuple[int, ...]) -> DoublyScaled:
    *batch, _, n = shape
    codes = jax.random.randint(key, shape, -3, 4, "int8")
    return DoublyScaled(codes, quantized("int8", None)(key, (*batch, 1, n)))


def lora_of_lora(key: jax.Array, shape: tuple[int, ...]):
    update = lora(jax.random.fold_in(key, 1), shape)
    return type(update)(lora(key, shape), update.a, update.b, scale=0.25)
