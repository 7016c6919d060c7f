"""`veneer compare`: how the predictions of quantized language models differ from a reference."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .shared import AsJson, Command, print_json, report_input_errors


def run(
    reference: Annotated[
        Path,
        typer.Argument(
            metavar="REFERENCE", help="The reference: a GGUF file or a Hugging Face folder."
        ),
    ],
    models: Annotated[
        list[Path],
        typer.Argument(metavar="MODEL...", help="The models to compare with the reference."),
    ],
    text: Annotated[
        Path,
        typer.Option(metavar="FILE", help="The text that the models read."),
    ],
    windows: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Read N windows of 512 tokens. The default is the whole text."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare language models with a reference, by their predictions on a text.

    The models read the text in windows of 512 tokens, and the second half of each window is scored.
    Prints the perplexity of each model; the mean and the 99.9th percentile of the KL divergence
    from the reference, in nats per token; the share of tokens for which the most likely token is
    the same; and the bytes of the weights. All models need the tokenizer of the reference. Needs
    the extra 'demo'.
    """
    with report_input_errors():
        from ..models import compare, load

        for path in models:  # before the reference is read, which takes time
            if not path.exists():
                raise FileNotFoundError(f"{path} does not exist")
        try:
            content = text.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{text} is not UTF-8: {error}") from error
        expected = load(reference)
        results = [
            (path, compare(expected, load(path), content, windows=windows)) for path in models
        ]
    first = results[0][1]
    if as_json:
        document: dict[str, Any] = {
            "reference": {
                "path": str(reference),
                "perplexity": first.reference_perplexity,
                "bytes": first.reference_nbytes,
            },
            "tokens": first.tokens,
            "models": [
                {"path": str(path)}
                | {
                    name.replace("nbytes", "bytes"): value
                    for name, value in asdict(result).items()
                    if name != "tokens" and not name.startswith("reference")
                }
                for path, result in results
            ],
        }
        print_json(document)
        return
    _print_results(reference, results, first)


def _print_results(reference: Path, results: list[tuple[Path, Any]], first: Any) -> None:
    from rich.filesize import decimal

    from .._report.tables import print_rich, rich_table

    columns = ["model", "bytes", "perplexity", "KL mean", "KL 99.9%", "same top token"]
    rows = [[str(reference), decimal(first.reference_nbytes), f"{first.reference_perplexity:.3f}"]]
    rows[0] += [""] * 3
    for path, result in results:
        rows.append(
            [
                str(path),
                decimal(result.nbytes),
                f"{result.perplexity:.3f}",
                f"{result.kl_mean:.4f}",
                f"{result.kl_99_9:.3f}",
                f"{result.same_top:.1%}",
            ]
        )
    print_rich(rich_table(columns, rows, None, right=columns[1:]))
    print(f"{first.tokens:,} tokens scored; KL divergence in nats per token")


COMMAND = Command(
    "compare",
    run,
    "Compare models with a reference.",
    examples=(
        "veneer compare model model-int8 model-nf4 --text text.txt",
        "veneer compare f16.gguf q4_0.gguf --text text.txt --windows 8 --json",
    ),
    usage="--text FILE [OPTIONS]",
    json_keys={
        "reference": "path, perplexity and bytes.",
        "tokens": "The number of tokens that were scored.",
        "models": "A list: path, perplexity, kl_mean and kl_99_9 (nats per token), same_top (a "
        "share) and bytes.",
    },
)
