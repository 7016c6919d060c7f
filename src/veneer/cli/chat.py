"""`veneer chat`: talk to a language model."""

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from .shared import AsJson, Command, OptionError, print_json, report_input_errors


def run(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A GGUF file, or a Hugging Face folder. Dense or quantized: Llama, Mistral, "
            "Qwen2, Qwen3 or SmolLM.",
        ),
    ],
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Answer this question and exit."),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The system message of the chat.")
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Quantize a dense model to this format first. 'veneer quantize --help' lists the "
            "formats.",
        ),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="The format of the cache of keys and values, such as int8. The default is the "
            "dtype of the model.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="The largest number of tokens of an answer.")
    ] = 512,
    temperature: Annotated[
        float,
        typer.Option(metavar="T", min=0, help="0 chooses the most likely token each time."),
    ] = 0.0,
    top_k: Annotated[
        int | None,
        typer.Option(metavar="K", min=1, help="Draw from the K most likely tokens only."),
    ] = None,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P",
            min=1e-6,
            max=1,
            help="Draw from the fewest tokens with a total probability of P.",
        ),
    ] = 1.0,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**32 - 1, help="The seed of random draws.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Talk to a language model. Its answers appear word by word.

    Without --prompt, each line that you type is a message, until the end of the input (Ctrl-D). The
    model sees the whole chat. --json needs --prompt. Needs the extra 'demo'.
    """
    if as_json and prompt is None:
        raise OptionError("--json prints one answer: add --prompt TEXT")
    if temperature == 0 and (top_k is not None or top_p < 1):
        raise OptionError("--top-k and --top-p need a --temperature above 0")
    start = time.perf_counter()
    with report_input_errors():
        import jax

        from ..models import load, make_cache
        from ..quant import get_format

        dtypes = ("float32", "float16", "bfloat16")
        for name in (format, cache):  # before the model is read, which takes time
            if name is not None and name not in dtypes:
                get_format(name)
        model = load(path, format)
        if cache is not None:
            jax.eval_shape(lambda: make_cache(model.config, 64, cache))  # checks its tiles
    load_seconds = time.perf_counter() - start
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "cache_format": cache,
    }
    chat = [] if system is None else [{"role": "system", "content": system}]
    if prompt is not None:
        chat.append({"role": "user", "content": prompt})
        answer = _answer(model, chat, options, show=not as_json)
        if as_json:
            print_json(_statistics(answer, model, load_seconds))
        return
    is_terminal = sys.stdin.isatty()
    while (line := _read_line(is_terminal)) is not None:
        if line.strip():
            chat.append({"role": "user", "content": line})
            answer = _answer(model, chat, options, show=True)
            chat.append({"role": "assistant", "content": answer.text})
            options["seed"] += 1  # other draws for the next answer


def _read_line(is_terminal: bool) -> str | None:
    """Return the next line of the input, or None at its end. Print a prompt for a terminal."""
    if is_terminal:
        print("> ", end="", flush=True)
    line = sys.stdin.readline()
    if not line and is_terminal:
        print()
    # Bytes that are not UTF-8 are surrogates, which the tokenizer rejects.
    line = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return line.rstrip("\n") if line else None


def _answer(model: Any, chat: list[Any], options: dict[str, Any], *, show: bool) -> Any:
    """Generate the answer to a list of messages. With `show`, print it while it is generated.

    `options` are keyword arguments of `LanguageModel.generate`, which returns the result.
    """
    encoding = sys.stdout.encoding or "utf-8"

    def write(text: str) -> None:
        print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)

    with report_input_errors():
        model.encode_chat(chat)  # raises the errors of the messages and of the template
    try:
        answer = model.generate(chat, on_text=write if show else None, **options)
    except BrokenPipeError:  # as in `veneer chat ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    if show:
        print()
    return answer


def _statistics(answer: Any, model: Any, load_seconds: float) -> dict[str, Any]:
    return {
        "answer": answer.text,
        "is_complete": answer.is_complete,
        "prompt_tokens": answer.prompt_tokens,
        "answer_tokens": len(answer.tokens),
        "load_seconds": load_seconds,
        "first_token_seconds": answer.first_token_seconds,
        "tokens_per_second": answer.tokens_per_second,
        "weight_bytes": model.nbytes,
        "resident_bytes": _resident_bytes(),
        "formats": model.formats,
    }


def _resident_bytes() -> int | None:
    """Return the resident memory of this process in bytes, or None where `/proc` is missing."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


COMMAND = Command(
    "chat",
    run,
    "Talk to a language model.",
    examples=(
        "veneer chat model.gguf",
        'veneer chat model --format int8 --prompt "Why is the sky blue?"',
        'veneer chat small --cache int8 --prompt "Why is the sky blue?" --json',
    ),
    json_keys={
        "answer": "The text.",
        "is_complete": "Whether the model ended the text. false if --max-tokens ended it.",
        "prompt_tokens, answer_tokens": "The numbers of tokens.",
        "load_seconds": "The time to load the model, and to quantize it with --format.",
        "first_token_seconds": "The time from the question to the first token, with compilation.",
        "tokens_per_second": "The speed after the first token. null for one token.",
        "weight_bytes": "The bytes of the parameters.",
        "resident_bytes": "The resident memory of the process. null if it is unknown.",
        "formats": "The formats of the weights, the most frequent first.",
    },
)
