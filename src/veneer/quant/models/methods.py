"""The methods of `calibrate`, by name: what each finds of a weight."""

from typing import NamedTuple

from jax.typing import DTypeLike


class RoundingMethod(NamedTuple):
    """A way to round a weight by what it meets.

    **Arguments:**

    - `factors`: of channels, that are found before it is rounded: those of `"awq"`, of
      `"smoothquant"`, or none.
    - `makes_up`: whether codes make up for the errors of those before, as GPTQ's do; or each is the
      nearest.
    """

    factors: str | None = None
    makes_up: bool = False


METHODS = {
    "nearest": RoundingMethod(),
    "gptq": RoundingMethod(makes_up=True),
    "awq": RoundingMethod("awq"),
    "awq+gptq": RoundingMethod("awq", makes_up=True),
    "smoothquant": RoundingMethod("smoothquant"),
    "smoothquant+gptq": RoundingMethod("smoothquant", makes_up=True),
}


def get_method(name: str) -> RoundingMethod:
    """Returns a row of `METHODS`.

    **Raises:** `ValueError` for an unknown name.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; it must be one of {', '.join(METHODS)}")
    return METHODS[name]


def method_for(
    rule_has: str | None, asked: str, *, rotate: bool, act_qtype: DTypeLike | None
) -> str:
    """Returns how a weight is rounded.

    **Arguments:**

    - `rule_has`: the method of its rule, or None.
    - `asked`: that of all others: without factors, where these would be of no use.
    - `rotate`, `act_qtype`: of the rule.
    """
    if rule_has is not None:
        return rule_has
    method = get_method(asked)
    useless = rotate or (method.factors == "smoothquant" and act_qtype is None)
    return ("gptq" if method.makes_up else "nearest") if useless else asked


def check_method(name: str, *, rotate: bool, act_qtype: DTypeLike | None) -> None:
    """Refuses a method that does not go with what else a rule says.

    **Raises:** `ValueError`.
    """
    factors = get_method(name).factors
    if factors and rotate:
        raise ValueError(
            f"rotate=True spreads outliers over all channels, and method {name!r} scales the "
            "channels with outliers. Choose one of them"
        )
    if factors == "smoothquant" and act_qtype is None:
        raise ValueError(
            f"method {name!r} is for quantized activations, and act_qtype is None. Set act_qtype, "
            "or use method='awq'"
        )
