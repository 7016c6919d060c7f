"""`veneer plan`: how to shard a language model over devices, as tables or as JSON."""

import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .shared import OPTION_NAMES_OF_RULES, AsJson, Command, OptionError, report_input_errors

if TYPE_CHECKING:
    from ..plan.models import ModelShapes
    from ..plan.splits import PlannedStep, SplitPlan

#: The number of splits in a table.
_SHOWN = 5


def run(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="The config.json of a language model, or its folder."
        ),
    ],
    devices: Annotated[int, typer.Option(min=1, metavar="N", help="The number of devices.")],
    memory: Annotated[
        str, typer.Option(metavar="BYTES", help="The memory per device, e.g. 80GB or 16GiB.")
    ],
    format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="The format of the weights: one of 'veneer quantize', or bf16, f16 or f32.",
        ),
    ] = "int4",
    tile: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="The group size. The default is the tile of the format. For formats without one, "
            "it is a channel for 8 bits, 64 values for 4 to 7 bits, and 32 for fewer.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Global batch size. The default is the number of devices."
        ),
    ] = None,
    length: Annotated[
        int, typer.Option(min=1, metavar="N", help="Sequence length in tokens.")
    ] = 4096,
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Format or dtype of the KV cache. The default is the dtype of the model.",
        ),
    ] = None,
    rank: Annotated[
        int, typer.Option(min=1, metavar="N", help="Rank of the LoRA updates for fine-tuning.")
    ] = 16,
    fused: Annotated[
        bool,
        typer.Option("--fused", help="Assume flash attention: scores are never all in memory."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Plan how to shard a language model for serving and fine-tuning, from its config.json.

    Lists splits into data, expert and tensor parallelism, with the bytes that each device holds and
    the bytes that it receives per step. "parts" means fully sharded. "ms" is a lower bound: the
    time to read and receive these bytes at the rates of an H100 with 8 devices per node.
    Multiplication is not included.
    """
    from ..plan import PlannedStep, model_of, plans

    option_names = OPTION_NAMES_OF_RULES | {"--exclude keeps tensors dense": "write f16"}
    with report_input_errors(option_names=option_names):
        memory_bytes = _parse_bytes(memory)
        model = model_of(_read_config(config))
        step = PlannedStep(batch or devices, length, cache=cache, fused=fused)
        steps = {"serving": step, "fine-tuning": step._replace(rank=rank)}
        uses = {
            use: (step, plans(model, format, step, devices, tile=tile))
            for use, step in steps.items()
        }
    if as_json:
        document: dict[str, Any] = {"architecture": model.architecture, "parameters": model.size}
        document["format"] = format
        for use, (step, found) in uses.items():
            splits = [_json_entries(plan, memory_bytes) for plan in found]
            document[use] = {"step": step._asdict(), "splits": splits}
        print(json.dumps(document, indent=2))
        return
    print(f"{model.architecture}: {model.size / 1e9:,.1f}B parameters, weights in {format}")
    for use, (step, found) in uses.items():
        print("\n".join(_describe_use(use, model, step, found, memory_bytes)))


def _parse_bytes(text: str) -> float:
    """Parse a number of bytes such as `80GB` or `16GiB`."""
    units = {
        unit + end: size**i
        for end, size in (("B", 1000), ("iB", 1024))
        for i, unit in enumerate(("", "k", "M", "G", "T"))
    }
    parts = re.fullmatch(r"(\d+|\d*\.\d+) *([a-zA-Z]+)", text)
    if parts is None or parts[2] not in units:
        raise OptionError(f"--memory {text!r} is not a number of bytes, such as 80GB or 16GiB")
    return float(parts[1]) * units[parts[2]]


def _read_config(path: Path) -> dict[str, Any]:
    """Return the entries of a `config.json`. `path` is the file or its folder."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: CONFIG is a config.json or its folder")
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(entries, dict):
        raise ValueError(f"{file} is not a JSON object")
    return entries


def _json_entries(plan: "SplitPlan", memory: float) -> dict[str, Any]:
    to_regex = lambda path: path.replace(".", r"\.").replace("*", r"\d+")
    shardings = {to_regex(path): list(spec) for path, spec in plan.shardings.items()}
    entries = plan._asdict() | {"split": plan.split._asdict(), "shardings": shardings}
    return {"fits": plan.fits(memory)} | entries | {"total": plan.total}


def _describe_use(
    use: str, model: "ModelShapes", step: "PlannedStep", plans: "list[SplitPlan]", memory: float
) -> list[str]:
    """Return lines that describe the fastest splits, and the shardings of the best one.

    **Arguments:**

    - `use`: the heading: "serving" or "fine-tuning".
    - `step`: the step that `plans` estimate.
    - `plans`: all splits, with the fastest first.
    - `memory`: the bytes of a device. Splits that do not fit are left out.
    """
    fitting = [plan for plan in plans if plan.fits(memory)]
    work, extra = "generates a token for each of", f"KV cache in {step.cache or model.dtype}"
    if step.rank is not None:
        work, extra = "trains on", f"LoRA of rank {step.rank}, Adam"
    lines = [
        f"\n{use}: a step {work} {step.batch} sequences of {step.length:,} tokens; {extra}",
        f"{len(fitting)} of {len(plans)} splits of {plans[0].split.mesh.size} devices fit "
        f"in {_format_bytes(memory)} with a tenth left free\n",
    ]
    if not fitting:
        smallest = min(plans, key=lambda plan: plan.total)
        return [*lines, _split_table([smallest]), "\nno split fits: this one needs the least"]
    best = fitting[0]
    pairs = zip(best.split._fields, best.split[:3], strict=False)
    axes = {name: n for name, n in pairs if n > 1} or {"data": 1}
    mesh = f"jax.make_mesh({tuple(axes.values())}, {tuple(axes)})"
    mesh += ", fully sharded" if best.split.in_parts else ""
    lines += [_split_table(fitting[:_SHOWN]), f"\nbest: {mesh}, with these shardings:\n"]
    short = lambda path: path.removeprefix("model.").removeprefix("layers.*.")
    names_by_spec: dict[str, list[str]] = {}
    for path, spec in best.shardings.items():
        names_by_spec.setdefault(f"P({', '.join(map(repr, spec))})", []).append(short(path))
    width = max(map(len, names_by_spec), default=0)
    for printed, names in names_by_spec.items():
        for i, text in enumerate(textwrap.wrap(", ".join(names), 94 - width)):
            lines.append(f"    {'' if i else printed:<{width}}  {text}")
    return lines + [f"\n{short(path)} is not sharded: {why}" for path, why in best.whole.items()]


def _split_table(plans: "Sequence[SplitPlan]") -> str:
    from .._report.tables import text_table

    held = list(plans[0].held)
    headings = ["data", "expert", "tensor", "parts", *held, "total", "received", "ms"]
    rows = [
        [
            *map(str, plan.split[:3]),
            "yes" if plan.split.in_parts else "",
            *(_format_bytes(plan.held[name]) for name in held),
            _format_bytes(plan.total),
            _format_bytes(sum(plan.received.values())),
            f"{1e3 * plan.seconds:,.1f}",
        ]
        for plan in plans
    ]
    return text_table(headings, rows, right=headings)


def _format_bytes(n: int | float) -> str:
    return f"{n / 1e9:,.1f} GB" if n >= 1e8 else f"{n / 1e6:,.1f} MB"


COMMAND = Command(
    "plan",
    run,
    "Plan how to shard a language model.",
    usage="--devices N --memory BYTES [OPTIONS]",
    examples=(
        "veneer plan model --devices 8 --memory 80GB",
        "veneer plan config.json --devices 64 --memory 80GB --format nf4 --fused",
        "veneer plan model --devices 8 --memory 16GiB --json",
    ),
    json_keys={
        "architecture": "model_type of config.json.",
        "parameters": "The number of parameters.",
        "format": "The format of the weights.",
        "serving": "step (batch, length, rank, cache, fused), and splits, a list with the fastest "
        "first: fits, split (data, expert, tensor, in_parts), held (bytes per device), received "
        "(bytes per step and device), seconds, shardings (regex to spec), whole (weights that "
        "cannot be divided, with the reason) and total (bytes per device).",
        "fine-tuning": "The same for training updates of rank --rank.",
    },
)
