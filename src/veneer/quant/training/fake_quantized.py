"""`FakeQuantized`: a weight in training, which the program sees quantised."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..._core.surface.array import ImplicitArray
from ..._core.tree import static
from ..._core.value import describe
from ..conversion.calibration import check_calibration
from ..conversion.fake_quantize import fake_quantize
from ..conversion.quantize import quantize
from ..conversion.scale_axes import ScaleAxes, from_the_end, scale_axes_of
from ..formats import Format, get_format
from ..formats.tiles import Shape
from ..qarray import QUANTIZABLE, QArray

Leaf = jax.Array | np.ndarray


class FakeQuantized(ImplicitArray):
    """A weight in training: kept in full, and quantised wherever a program uses it.

    It stands for `dequantize(quantize(w))`, with derivatives that go straight through to `w`, but
    for values beyond what the format reaches, which have none. So gradients move `w` by less than
    a step of the format, and these steps add up. `vn.quant.convert` makes a `QArray` of it in the
    end, with which programs give the same.

    A product that contracts `tile_axis` does more, where its recipe says so:

    - with `act_qtype`, the other operand is quantised as well, each row by its own scale;
    - with `grad_qtype`, products run on codes, forward and backward, and the gradient that comes
      back is quantised, too. Forward-mode derivatives (`jax.jvp`) of these are refused by JAX.

    `vn.quant.quantize_tree(params, rules, train=True)` makes them.

    **Arguments:**

    - `w`: the weight, `[..., in, out]`, floating.
    - `key`: a typed PRNG key for each index of the axes before `tile_axis`; with it, gradients are
      rounded stochastically. See `vn.quant.with_stochastic_rounding`.
    - `qtype`, `tile_size`, `tile_axis`, `calibration_method`, `act_qtype`,
      `act_calibration_method`, `grad_qtype`: as in `vn.quant.Rule`; with `qtype=None` the weight
      itself is not quantised.
    - `dense_dtype`: of the array that it stands for; that of `w` if None.

    **Raises:** `TypeError` where `w` is no floating array. `ValueError` for an unknown format or
    method, an axis that `w` does not have, a tile that does not divide it, or a key of another
    shape.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.FakeQuantized(jnp.array([[0.3, -1.0], [1.5, 0.1]]), qtype="int2")
    >>> vn.materialise(w).tolist()
    [[0.0, -1.33...], [1.0, 0.0]]
    >>> jax.grad(lambda w: (jnp.ones(2) @ w).sum())(w).w.tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """

    metadata_is_meaning: ClassVar[bool] = False
    trainable: ClassVar[tuple[str, ...] | None] = ("w",)
    #: Its one leaf is of its shape and dtype, and not what it stands for.
    is_label: ClassVar[bool | None] = False

    w: Leaf
    key: Any = None
    qtype: str | None = static(default=None, kw_only=True)
    tile_size: int | None = static(default=None, kw_only=True)
    tile_axis: int | Sequence[int] = static(default=-2, kw_only=True)
    calibration_method: str | None = static(default=None, kw_only=True)
    act_qtype: str | None = static(default=None, kw_only=True)
    act_calibration_method: str | None = static(default=None, kw_only=True)
    grad_qtype: str | None = static(default=None, kw_only=True)
    dense_dtype: str | None = static(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.w, Leaf) or self.w.dtype not in QUANTIZABLE:
            described = f"of {self.w.dtype}" if hasattr(self.w, "dtype") else repr(self.w)
            raise TypeError(f"FakeQuantized trains a floating array, not one {described}")
        self.__dict__["tile_axis"] = from_the_end(self.tile_axis, self.w.shape)
        formats = {name: getattr(self, name) for name in ("qtype", "act_qtype", "grad_qtype")}
        self.__dict__.update(
            dense_dtype=jnp.dtype(self.dense_dtype or self.w.dtype).name,
            tile_size=None if self.tile_size is None else operator.index(self.tile_size),
            **{name: qtype and get_format(qtype).name for name, qtype in formats.items()},
        )
        if self.act_qtype is not None and self.act_calibration_method is not None:
            check_calibration(self.act_calibration_method, get_format(self.act_qtype))
        self.aval()
        jax.eval_shape(self.quantize)  # raises where a tile or a method does not fit

    @classmethod
    def from_rule(cls, array: Leaf, rule: Any) -> "FakeQuantized":
        """Makes one of an array, with what a `vn.quant.Rule` says.

        **Raises:** what `FakeQuantized` raises.

        >>> import jax.numpy as jnp, veneer as vn
        >>> rule = vn.quant.Rule(".*", "int4", act_qtype="int8")
        >>> vn.quant.FakeQuantized.from_rule(jnp.ones((4, 2)), rule)
        FakeQuantized(w=f32[4,2], qtype='int4', act_qtype='int8')
        """
        return cls(
            array,
            qtype=rule.qtype,
            tile_size=rule.tile(array.shape),
            tile_axis=rule.contracting(array.ndim),
            calibration_method=rule.calibration_method,
            act_qtype=rule.act_qtype,
            act_calibration_method=rule.act_calibration_method,
            grad_qtype=rule.grad_qtype,
        )

    @property
    def format(self) -> Format | None:
        """The row of `FORMATS` that `qtype` names."""
        return None if self.qtype is None else get_format(self.qtype)

    @property
    def scales_are_quantised(self) -> bool:
        """Whether scales of a matrix have scales of their own, so that it is not to be parted."""
        return self.format is not None and self.format.scale_tile is not None

    @property
    def tile_axes(self) -> tuple[int, ...]:
        """Those of `tile_axis`, counted from the front."""
        axes: Any = self.tile_axis
        return tuple(axis % self.w.ndim for axis in axes)

    @property
    def grid(self) -> ScaleAxes:
        """Which values of `w` share a scale."""
        return scale_axes_of(self.w.ndim, self.tile_axes, self.format, self.tile_size)

    @property
    def lead(self) -> int:
        """How many axes come before those of `tile_axis`: `key` has them."""
        return min(self.tile_axes)

    def changed(self, **changes: Any) -> "FakeQuantized":
        """Returns a copy with other fields, which are not checked: they may be abstract."""
        new = object.__new__(type(self))
        new.__dict__.update({k: v for k, v in self.__dict__.items() if not k.startswith("_")})
        new.__dict__.update(changes)
        return new

    def aval(self) -> jax.core.ShapedArray:
        """Returns the shape of `w`, and the dense dtype."""
        aval = jax.typeof(self.w)
        axes: Any = self.tile_axis
        least = max(2 if self.scales_are_quantised else 1, -min(axes))
        if aval.ndim < least:
            raise ValueError(f"w of shape {aval.shape} has no tile_axis {self.tile_axis}")
        if self.key is not None and self.key.shape != aval.shape[: self.lead]:
            raise ValueError(
                f"key has shape {self.key.shape}; w of shape {aval.shape} with tile_axis "
                f"{self.tile_axis} takes typed keys of shape {aval.shape[: self.lead]}"
            )
        dtype = jax.dtypes.canonicalize_dtype(self.dense_dtype)
        return aval.update(dtype=dtype, weak_type=False)

    def quantize(self) -> jax.Array | QArray:
        """Returns the QArray that it becomes, without derivatives; dense if `qtype` is None."""
        if self.qtype is None:
            return jnp.asarray(self.w).astype(self.dtype)
        q = quantize(
            self.w,
            self.qtype,
            calibration_method=self.calibration_method,
            **self.grid.arguments,
        )
        return q.replace(dense_dtype=self.dense_dtype)

    def materialise(self) -> jax.Array:
        """Returns the weight as quantised, with derivatives that go straight through."""
        if self.qtype is None:
            return jnp.asarray(self.w).astype(self.dtype)
        dense = fake_quantize(
            self.w,
            self.qtype,
            calibration_method=self.calibration_method,
            **self.grid.arguments,
        )
        return dense.astype(self.dtype)

    def partition(self, spec: PartitionSpec, shape: Shape) -> "FakeQuantized | None":
        """The weight is cut where no tile is."""
        whole = shape == self.shape
        for axis in range(self.ndim):
            size = self.grid.size(axis)
            cut = spec[axis] is not None and not whole
            if cut and (size is None or shape[axis] % size or self.scales_are_quantised):
                return None
        key = None if self.key is None else PartitionSpec(*spec[: self.lead])
        return self.changed(w=spec, key=key)

    def __repr__(self) -> str:
        """With what is not as it is by default."""
        usual = {"tile_axis": (-2,), "dense_dtype": str(getattr(self.w, "dtype", None))}
        values = {f.name: getattr(self, f.name, None) for f in dataclasses.fields(self)}
        parts = [
            f"{name}={describe([x])[0] if name in ('w', 'key') else repr(x)}"
            for name, x in values.items()
            if x is not None and usual.get(name) != x
        ]
        return f"FakeQuantized({', '.join(parts)})"
