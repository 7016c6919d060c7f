"""A plan as a table of splits, and as JSON."""

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from .._report.tables import text_table
from .models import ModelShapes
from .splits import PlannedStep, SplitPlan

_SHOWN = 5


def as_text(
    model: ModelShapes,
    format: str,
    uses: dict[str, tuple[PlannedStep, list[SplitPlan]]],
    memory: float,
) -> str:
    """The splits that fit, those that are fastest first, and the best with its shardings.

    **Arguments:**

    - `uses`: what the model is used for: a step, and the plans for it.
    """
    return "\n".join(
        [
            f"{model.architecture}: {model.size / 1e9:,.1f}B parameters, weights in {format}",
            *(_of_use(name, model, *use, memory) for name, use in uses.items()),
        ]
    )


def _of_use(
    name: str, model: ModelShapes, step: PlannedStep, plans: list[SplitPlan], memory: float
) -> str:
    fitting = [plan for plan in plans if plan.fits(memory)]
    devices = plans[0].split.mesh.size
    does = "generates a token for each of" if step.rank is None else "trains on"
    kept = f"KV cache in {step.cache or model.dtype}"
    kept = kept if step.rank is None else f"LoRA of rank {step.rank}, Adam"
    lines = [
        f"\n{name}: a step {does} {step.batch} sequences of {step.length:,} tokens; {kept}",
        f"{len(fitting)} of {len(plans)} splits of {devices} devices fit "
        f"in {_size(memory)} with a tenth left free\n",
    ]
    if not fitting:
        least = min(plans, key=lambda plan: plan.total)
        return "\n".join([*lines, _table([least]), "\nno split fits: this one needs the least"])
    best = fitting[0]
    lines += [_table(fitting[:_SHOWN]), f"\nbest: {_mesh(best)}, with these shardings:\n"]
    specs: dict[P, list[str]] = {}
    for path, spec in best.shardings.items():
        specs.setdefault(spec, []).append(_short(path))
    wide = max(map(len, map(_spec, specs)), default=0)
    for spec, names in specs.items():
        wrapped = textwrap.wrap(", ".join(names), 94 - wide)
        heads = [_spec(spec), *[""] * (len(wrapped) - 1)]
        pairs = zip(heads, wrapped, strict=True)
        lines += [f"    {head:<{wide}}  {text}" for head, text in pairs]
    lines += [f"\n{_short(path)} is not sharded: {why}" for path, why in best.whole.items()]
    return "\n".join(lines)


def _short(path: str) -> str:
    return path.removeprefix("model.").removeprefix("layers.*.")


def _mesh(plan: SplitPlan) -> str:
    pairs = zip(plan.split._fields, plan.split[:3], strict=False)
    several = {name: n for name, n in pairs if n > 1} or {"data": 1}
    made = f"jax.make_mesh({tuple(several.values())}, {tuple(several)})"
    return made + (", fully sharded" if plan.split.in_parts else "")


def _spec(spec: P) -> str:
    return f"P({', '.join(map(repr, spec))})"


def _table(plans: Sequence[SplitPlan]) -> str:
    held = list(plans[0].held)
    headings = ["data", "expert", "tensor", "parts", *held, "total", "received", "ms"]
    rows = [
        [
            *map(str, plan.split[:3]),
            "yes" if plan.split.in_parts else "",
            *(_size(plan.held[name]) for name in held),
            _size(plan.total),
            _size(sum(plan.received.values())),
            f"{1e3 * plan.seconds:,.1f}",
        ]
        for plan in plans
    ]
    return text_table(headings, rows, right=headings)


def _size(n: int | float) -> str:
    return f"{n / 1e9:,.1f} GB" if n >= 1e8 else f"{n / 1e6:,.1f} MB"


def as_json(
    model: ModelShapes,
    format: str,
    uses: dict[str, tuple[PlannedStep, list[SplitPlan]]],
    memory: float,
) -> str:
    """All splits, with all that is known of them, those that are fastest first."""
    found = {
        name: {"step": step._asdict(), "splits": [_entries(plan, memory) for plan in plans]}
        for name, (step, plans) in uses.items()
    }
    said = {"architecture": model.architecture, "parameters": model.size, "format": format}
    return json.dumps(said | found, indent=2)


def _entries(plan: SplitPlan, memory: float) -> dict[str, Any]:
    regex = lambda path: path.replace(".", r"\.").replace("*", r"\d+")
    lie = {regex(path): list(spec) for path, spec in plan.shardings.items()}
    said = plan._asdict() | {"split": plan.split._asdict(), "shardings": lie}
    return {"fits": plan.fits(memory)} | said | {"total": plan.total}
