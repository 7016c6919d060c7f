"""`Label`: the base class of arrays with static metadata, such as a unit or axis names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax

from .._core.surface.array import ImplicitArray
from .._core.trace import redispatch
from .._core.value import Value
from .._jax.primitives import Primitive


class Label(ImplicitArray, abstract=True):
    """An array with static metadata: the base class of `Named` and `Quantity`.

    A label is an instance of a subclass. A primitive runs on the arrays in the labels, which may be
    implicit. The *law* of a primitive is a function that computes the metadata of the results from
    the metadata of the operands. If the operands are labels of two classes, the class with the
    higher `default_precedence` handles the primitive, and treats the other label as an array.

    Labels have no rules of primitives, but the method `default`, which runs if no rule fits. So the
    rules of other types run first, also if one of their operands is a label.
    """

    #: A law for each primitive name. Other primitives materialize a label, or raise.
    laws: ClassVar[Mapping[str, Callable]]

    @staticmethod
    def default(primitive: Primitive, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """Run a primitive on the arrays inside the labels, and label its results.

        The label class with the highest `default_precedence` among the operands selects the law.

        **Returns:** the results, or `NotImplemented` if the class has no law for the primitive.

        **Raises:** the `ValueError` of the law, with the primitive and its operands.
        """
        classes = {type(v) for v in values if isinstance(v, Label)}
        cls = max(classes, key=lambda cls: cls.default_precedence)
        law = cls.laws.get(primitive.name)
        if law is None:
            return NotImplemented
        try:
            outcome = cls.apply_law(law, values, params)
        except ValueError as error:
            shown = ", ".join(
                repr(v) if isinstance(v, Value) else jax.typeof(v).str_short(short_dtypes=True)
                for v in values
            )
            raise ValueError(f"{primitive.name}({shown}): {error}") from None
        if outcome is NotImplemented:
            return NotImplemented
        arrays, metadata = outcome
        bind_params = primitive.get_bind_params(params)
        # The arrays can be implicit, and then have rules of their own.
        out = redispatch(lambda *arrays: primitive.bind(*arrays, **bind_params), *arrays)
        if not primitive.multiple_results:
            return cls.attach(out, metadata[0] if isinstance(metadata, list) else metadata)
        if not isinstance(metadata, list):
            metadata = [metadata] * len(out)
        # A law can return too many items: an SVD may compute only the singular values.
        return [cls.attach(x, item) for x, item in zip(out, metadata, strict=False)]

    @classmethod
    def apply_law(
        cls, law: Callable, values: Sequence[Any], params: dict[str, Any]
    ) -> tuple[list[Any], Any]:
        """Apply a law to the operands of a primitive.

        **Arguments:**

        - `law`: the function in `laws` for the primitive.
        - `values`, `params`: the operands and the parameters of the primitive.

        **Returns:** the arrays on which the primitive runs, and the metadata of its results: one
        item for all results, or a list with an item per result. Or `NotImplemented`, which
        materializes the labels.
        """
        raise NotImplementedError

    @classmethod
    def attach(cls, array: Any, metadata: Any) -> Any:
        """Return `array` as a label with this metadata. If `metadata` is empty, return `array`."""
        raise NotImplementedError
