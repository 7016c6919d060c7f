"""`Label`: an array of which something is said, and the laws by which primitives carry that on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ..._core.surface.array import ImplicitArray
from ..._core.transform import redispatch
from ..._jax.primitives import Primitive


class Label(ImplicitArray, abstract=True):
    """An array with static metadata: the base class of `Named` and `Quantity`.

    A primitive runs on the arrays, which may be implicit. A law computes the metadata of the
    results from the metadata of the operands. If labels of two kinds meet, the kind with the higher
    `default_precedence` handles the primitive, and treats the other as an array.

    This is a `default`, not a rule per primitive. So operands of other types can stand next to a
    label, and their rules run first.
    """

    #: A law for each primitive, by its name. Those not listed make a label dense, or refuse.
    laws: ClassVar[Mapping[str, Callable]]

    @staticmethod
    def default(primitive: Primitive, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """Run a primitive by the law of the outermost label among the operands."""
        kinds = {type(v) for v in values if isinstance(v, Label)}
        kind = max(kinds, key=lambda kind: kind.default_precedence)
        law = kind.laws.get(primitive.name)
        return NotImplemented if law is None else kind.by_law(law, primitive, values, params)

    @classmethod
    def by_law(
        cls, law: Callable, primitive: Primitive, values: Sequence[Any], params: dict[str, Any]
    ) -> Any:
        """Run a primitive, and give its results the metadata that the law computes."""
        raise NotImplementedError


def bind(primitive: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Binds a primitive on operands some of which may be implicit, for their rules to run."""
    of_bind = primitive.get_bind_params(params)
    return redispatch(lambda *operands: primitive.bind(*operands, **of_bind), *operands)
