"""`Label`: an array of which something is said, and the laws by which primitives carry that on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ..._core.surface.array import ImplicitArray
from ..._core.transform import redispatch
from ..._jax.primitives import Primitive


class Label(ImplicitArray, abstract=True):
    """The base of `Named` and `Quantity`: one array, and static metadata beside it.

    A primitive runs on the arrays, which may be implicit in turn, and a law says from the metadata
    of the operands what the metadata of the results is. Where labels of two kinds meet, the law of
    the kind of higher `default_precedence` is asked first, and takes the other for an array.

    This is a `default` and not a rule for each primitive, so that operands of any other type may
    stand beside a label, and a rule of such a type goes first.
    """

    #: A law for each primitive, by its name. Those not listed make a label dense, or refuse.
    laws: ClassVar[Mapping[str, Callable]]

    @staticmethod
    def default(primitive: Primitive, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """What the law of the outermost label among the operands gives, if there is one."""
        kinds = {type(v) for v in values if isinstance(v, Label)}
        kind = max(kinds, key=lambda kind: kind.default_precedence)
        law = kind.laws.get(primitive.name)
        return NotImplemented if law is None else kind.by_law(law, primitive, values, params)

    @classmethod
    def by_law(
        cls, law: Callable, primitive: Primitive, values: Sequence[Any], params: dict[str, Any]
    ) -> Any:
        """What a primitive gives, with the metadata that a law says; or NotImplemented."""
        raise NotImplementedError


def bind(primitive: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Binds a primitive on operands some of which may be implicit, for their rules to run."""
    of_bind = primitive.get_bind_params(params)
    return redispatch(lambda *operands: primitive.bind(*operands, **of_bind), *operands)
