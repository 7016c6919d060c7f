"""Run a batch of texts in llama.cpp, through its C library, for `decode.py`.

The class `llama_cpp.Llama` has only one text. To import this module, `llama-cpp-python` is not
needed. To compile it for the instructions of this CPU, run `pip install --no-binary :all:
llama-cpp-python`, which takes ten minutes.
"""

import ctypes
import functools
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

F32, F16, Q8_0 = 0, 1, 8  # the numbers of cache types in ggml


def missing() -> list[str]:
    """Return the names of the required packages that are not installed."""
    return [name for name in ("llama_cpp",) if find_spec(name) is None]


@functools.cache
def _silence(low: Any) -> Any:
    """Turn off the log of llama.cpp. Return the callback, which must stay alive."""
    quiet = low.llama_log_callback(lambda level, text, data: None)
    low.llama_log_set(quiet, None)
    return quiet


def quantize(dense: Path, to: Path, file_type: int) -> None:
    """Let llama.cpp quantize a dense GGUF file to another file type."""
    import llama_cpp

    low: Any = llama_cpp.llama_cpp
    _silence(low)
    params = low.llama_model_quantize_default_params()
    params.ftype = file_type
    if low.llama_model_quantize(str(dense).encode(), str(to).encode(), ctypes.byref(params)) != 0:
        raise RuntimeError(f"llama.cpp cannot quantize {dense} to {to}")


class Model:
    """A GGUF file that llama.cpp has loaded."""

    def __init__(self, path: Path):
        import llama_cpp

        self.low: Any = llama_cpp.llama_cpp
        _silence(self.low)
        self.low.llama_backend_init()
        params = self.low.llama_model_default_params()
        # The AMX products of llama.cpp crash in `ldtilecfg` on some machines.
        params.use_extra_bufts = "amx" not in Path("/proc/cpuinfo").read_text()
        self.model = self.low.llama_model_load_from_file(str(path).encode(), params)
        self.vocabulary = self.low.llama_vocab_n_tokens(self.low.llama_model_get_vocab(self.model))

    def close(self) -> None:
        """Free the model."""
        self.low.llama_model_free(self.model)


class Texts:
    """A batch of texts of the same length, with a cache.

    **Arguments:**

    - `batch`: the number of texts.
    - `room`: the number of tokens per text.
    - `cache`: the type of keys and values. A quantized type uses flash attention.
    - `threads`: the number of threads.
    """

    def __init__(self, model: Model, batch: int, room: int, *, cache: int, threads: int):
        self.model, self.low, self.batch = model, model.low, batch
        params = self.low.llama_context_default_params()
        params.n_ctx, params.n_seq_max = batch * room, batch
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = cache
        params.flash_attn = cache == Q8_0
        params.no_perf = True
        self.context = self.low.llama_init_from_model(model.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot create a context for {batch} x {room} tokens")
        self.memory = self.low.llama_get_memory(self.context)
        self.part = self.low.llama_batch_init(512, 0, 1)

    def close(self) -> None:
        """Free the context."""
        self.low.llama_batch_free(self.part)
        self.low.llama_free(self.context)

    def read(self, count: int, start: int = 0) -> int:
        """Read `count` tokens as the first text. Return the most likely next token."""
        for begin in range(start, start + count, 512):
            places = range(begin, min(begin + 512, start + count))
            self._decode([1] * len(places), places, [0] * len(places), asked=[len(places) - 1])
        return self._likeliest(len(places) - 1)

    def write(self, count: int, start: int) -> np.ndarray:
        """Decode and return tokens `[count, batch]` after `start` tokens. Then forget them."""
        tokens, texts = [1] * self.batch, range(self.batch)
        written = []
        for place in range(start, start + count):
            self._decode(tokens, [place] * self.batch, texts, asked=texts)
            tokens = [self._likeliest(row) for row in texts]
            written.append(tokens)
        self.forget(start)
        return np.array(written)

    def forget(self, start: int) -> None:
        """Remove the tokens from the position `start` on from the cache."""
        for text in range(self.batch):
            self.low.llama_memory_seq_rm(self.memory, text, start, -1)

    def contents(self) -> Any:
        """Return the cache contents of the first text, for `fill`."""
        size = self.low.llama_state_seq_get_size(self.context, 0)
        data = (ctypes.c_uint8 * size)()
        self.low.llama_state_seq_get_data(self.context, data, size, 0)
        return data

    def fill(self, data: Any) -> None:
        """Copy cache contents into each text. The cache must have the same shape and type."""
        for text in range(self.batch):
            if not self.low.llama_state_seq_set_data(self.context, data, len(data), text):
                raise RuntimeError("llama.cpp rejected the contents of a cache")

    def _decode(
        self, tokens: Sequence[int], places: Sequence[int], texts: Sequence[int], asked: Any
    ) -> None:
        part = self.part
        part.n_tokens = len(tokens)
        for i, (token, place, text) in enumerate(zip(tokens, places, texts, strict=True)):
            part.token[i], part.pos[i], part.n_seq_id[i] = token, place, 1
            part.seq_id[i][0], part.logits[i] = text, i in asked
        if failed := self.low.llama_decode(self.context, part):
            raise RuntimeError(f"llama_decode failed with code {failed}")

    def _likeliest(self, row: int) -> int:
        logits = self.low.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.model.vocabulary,)).argmax())
