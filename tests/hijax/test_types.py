"""High types, which every implicit array has without code by its author."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import struct

import veneer as vn
from veneer.hijax.types import TangentType, type_of


class Scaled(vn.ImplicitArray):
    x: jax.Array
    by: float = vn.static(default=2.0)

    def materialise(self):
        return self.x * self.by


class EquinoxScaled(eqx.Module, vn.ImplicitArray):
    x: jax.Array
    by: float = eqx.field(static=True, default=2.0)

    def materialise(self):
        return self.x * self.by


@struct.dataclass
class FlaxScaled(vn.ImplicitArray):
    x: jax.Array
    by: float = struct.field(pytree_node=False, default=2.0)

    def materialise(self):
        return self.x * self.by


CLASSES = [Scaled, EquinoxScaled, FlaxScaled]


@pytest.mark.parametrize("cls", CLASSES)
def test_a_type_has_the_shape_and_dtype_of_its_value(cls):
    t = type_of(cls(jnp.ones((2, 3))))
    assert (t.shape, t.dtype, str(t)) == ((2, 3), jnp.float32, f"{cls.__name__.lower()}[2,3]")
    assert isinstance(t, jax.core.ShapedArray)


@pytest.mark.parametrize("cls", CLASSES)
def test_jax_functions_accept_every_kind_of_class(cls):
    value = cls(jnp.arange(6.0).reshape(2, 3))
    assert jax.jit(lambda v: jnp.sum(v, axis=1))(value).tolist() == [6.0, 24.0]
    assert "scaled[2,3]" in str(jax.make_jaxpr(jnp.sum)(value))


def test_types_differ_by_metadata_and_leaves():
    t = type_of(Scaled(jnp.ones(3)))
    assert t == type_of(Scaled(jnp.zeros(3)))
    assert hash(t) == hash(type_of(Scaled(jnp.zeros(3))))
    others = Scaled(jnp.ones(3), by=3.0), Scaled(jnp.ones(4)), Scaled(jnp.ones(3, jnp.bfloat16))
    assert all(type_of(other) != t for other in others)


def test_a_value_survives_lowering_and_raising(weight):
    t = type_of(weight.value)
    leaves = t.lower_val(weight.value)
    assert list(map(jax.typeof, leaves)) == t.lo_ty()
    assert type_of(t.raise_val(*leaves)) == t


def test_a_leading_axis_can_be_added_and_removed(weight):
    t = type_of(weight.value)
    assert t.inc_rank(3, t.leading_axis_spec()) == type_of(weight.stack)
    assert type_of(weight.stack).dec_rank(3, 0) == t


def test_an_axis_that_some_leaves_lack_cannot_be_mapped():
    class Row(vn.ImplicitArray):
        x: jax.Array  # [..., n]

        def materialise(self):
            return jnp.stack([self.x, self.x], axis=-2)

    with pytest.raises(TypeError, match=r"row\[2,3\] cannot be mapped along axis 1"):
        type_of(Row(jnp.ones(3))).dec_rank(3, 1)


def test_tangent_types_hold_leaves_or_are_dense():
    lora = vn.types.LoraArray(jnp.ones((4, 6)), jnp.ones((4, 2)), jnp.ones((2, 6)))
    assert isinstance(type_of(lora).to_tangent_aval(), TangentType)
    assert len(type_of(lora).to_tangent_aval().lo_ty()) == 3
    q = vn.quant.quantize(jnp.ones((4, 6)), "int8")
    assert type_of(q).to_tangent_aval() == jax.typeof(jnp.ones((4, 6)))


@pytest.mark.parametrize(("qtype", "name"), [("int8", "q8"), ("int4", "q4"), ("nf4", "nf4")])
def test_a_class_can_name_its_types(qtype, name):
    q = vn.quant.quantize(jnp.ones((4, 6)), qtype)
    assert str(type_of(q)) == f"{name}[4,6]"
    assert str(type_of(vn.types.LoraArray(q, jnp.ones((4, 2)), jnp.ones((2, 6))))) == "lora[4,6]"
