"""`veneer demo`: compare a sentence encoder and a language model, dense and quantized."""

from pathlib import Path
from typing import Annotated

import typer

from .shared import AsJson, Command, print_json, report_input_errors


def run(
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The Hugging Face folder of a BERT encoder. The default is all-MiniLM-L6-v2.",
        ),
    ] = None,
    gguf: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The GGUF file of a Llama. The default is SmolLM2-135M-Instruct.",
        ),
    ] = None,
    ask: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A question for the language model.")
    ] = None,
    output: Annotated[Path, typer.Option(metavar="DIR", help="The folder for the picture.")] = Path(
        "demo-output"
    ),
    as_json: AsJson = False,
) -> None:
    """Quantize a sentence encoder and a language model, and compare them with the dense models.

    Prints sizes, errors and times, a search, and an answer of the language model. Downloads the
    default models on the first run (180 MB). Needs the extra 'demo'.
    """
    from rich.console import Console

    console = Console(stderr=as_json)
    with report_input_errors(option_names={}):
        from ..demo import encoder_demo, language_model

        encoder = encoder_demo.load(model, console)
        llama = language_model.load_model(gguf, console)
    with report_input_errors((OSError,)):
        question = language_model.QUESTION if ask is None else ask
        document = {
            "encoder": encoder_demo.main(encoder, output, console),
            "language_model": language_model.main(llama, question, console),
        }
    if as_json:
        print_json(document)


COMMAND = Command(
    "demo",
    run,
    "Run the demo: two models, dense and quantized.",
    examples=(
        "veneer demo",
        'veneer demo --gguf model.gguf --ask "Why is the sky blue?"',
        "veneer demo --json",
    ),
    json_keys={
        "encoder": "variants, a list: name, bytes, cosine, neighbor_kept, batch_ms and single_ms; "
        "picture (its path); query; and nearest, a list of score and sentence.",
        "language_model": "variants, a list: name, bytes, perplexity and tokens_per_second; "
        "question; answer; operations (the number in a step that have packed operands); and "
        "largest_materialized (bytes of the largest array that a step materializes).",
    },
)
