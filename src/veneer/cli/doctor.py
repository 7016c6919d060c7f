"""`veneer doctor`: check which kernels this machine uses, and how fast they are."""

from typing import Annotated

import typer

from .shared import AsJson, Command, print_json, report_input_errors


def run(
    choose: Annotated[
        bool,
        typer.Option(
            "--choose",
            help="Measure the vector instruction sets of this CPU, and use the fastest from now "
            "on.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check which kernels this machine uses, whether they are correct, and how fast they are.

    The exit code is 1 if a finding is a problem.
    """
    from ..doctor import choices, findings

    with report_input_errors():
        results = choices() if choose else findings()
    shown = []
    for finding in results:
        shown.append(finding)
        if not as_json:
            print(f"{finding.name:<26}{finding.text}", flush=True)
    is_well = all(finding.is_well for finding in shown)
    if as_json:
        print_json({"is_well": is_well, "findings": [finding._asdict() for finding in shown]})
    raise typer.Exit(not is_well)


COMMAND = Command(
    "doctor",
    run,
    "Check the kernels of this machine.",
    examples=("veneer doctor", "veneer doctor --choose", "veneer doctor --json"),
    json_keys={
        "is_well": "false if a finding is a problem. Then the exit code is 1.",
        "findings": "A list: name, text and is_well.",
    },
)
