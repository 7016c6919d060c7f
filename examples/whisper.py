"""Whisper in plain JAX: transcribe up to 30 seconds of English speech.

An encoder reads sound, and a decoder writes text (Radford et al., 2022), greedily, in one compiled
loop. The model is a folder of CTranslate2. The parameters keep its names, such as
`encoder/layer_0/ffn/linear_0/weight`. Matrices are `[out, in]`. This file does not import veneer.

    python examples/whisper.py MODEL_DIR SOUND.wav
"""

import argparse
import functools
import json
import re
import struct
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Params = Mapping[str, Any]

RATE, SECONDS = 16_000, 30  # the sample rate, and the length of the input
WINDOW, HOP, BANDS = 400, 160, 80  # the sizes of a spectrogram
START, SILENT_TIMES, END = 50_257, 50_362, 50_256  # special tokens of the English models


@dataclass(frozen=True)
class Config:
    """The settings that shapes do not contain. Hashable, so that `jit` can take it as static."""

    num_heads: int
    encoder_layers: int
    decoder_layers: int
    suppressed: tuple[int, ...] = ()  # tokens that are never written
    suppressed_first: tuple[int, ...] = ()  # tokens that no text begins with


# Sound.


def read_wav(path: Path) -> np.ndarray:
    """Read a 16-bit WAV file as one channel with 16,000 samples per second."""
    from scipy.signal import resample_poly

    with wave.open(str(path)) as file:
        if file.getsampwidth() != 2:
            raise ValueError(f"{path} has {8 * file.getsampwidth()} bits a number, and not 16")
        sound = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
        sound = sound.reshape(-1, file.getnchannels()).mean(1)
        return resample_poly(sound, RATE, file.getframerate()).astype(np.float32)


@functools.cache
def bands() -> np.ndarray:
    """Return the weight of each frequency in each band, `[201, 80]`, on Slaney's mel scale.

    The bands are triangles with an area of one. The scale is linear up to 1 kHz, with 200/3 Hz per
    mel. Above, it is logarithmic, with 27 mels per factor of 6.4.
    """
    step, knee = 200 / 3, 15.0
    to_mel = lambda hz: np.where(hz < 1000, hz / step, knee + 27 * np.log(hz / 1000) / np.log(6.4))
    to_hz = lambda m: np.where(m < knee, m * step, 1000 * 6.4 ** ((m - knee) / 27))
    edges = to_hz(np.linspace(0, to_mel(np.array(RATE / 2)), BANDS + 2))
    frequencies = np.fft.rfftfreq(WINDOW, 1 / RATE)[:, None]
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    triangles = np.clip(np.minimum(rising, falling), 0, None) * 2 / (high - low)
    return triangles.astype(np.float32)


def spectrogram(sound: Array) -> Array:
    """Return the log power of each band in 30 seconds, `[3000, 80]`, from about -1 to 1.

    Shorter sound is padded with silence, and longer sound is cut.
    """
    size = RATE * SECONDS
    sound = jnp.pad(jnp.asarray(sound)[:size], (0, max(0, size - len(sound))))
    padded = jnp.pad(sound, WINDOW // 2, mode="reflect")
    at = np.arange(size // HOP)[:, None] * HOP + np.arange(WINDOW)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    power = jnp.abs(jnp.fft.rfft(padded[at] * hann.astype(np.float32))) ** 2
    logs = jnp.log10(jnp.maximum(power @ bands(), 1e-10))
    return (jnp.maximum(logs, logs.max() - 8) + 4) / 4


# The model.


def linear(p: Params, name: str, x: Array) -> Array:
    """Multiply by a matrix `[out, in]`, and add the bias."""
    return x @ p[f"{name}/weight"].T + p[f"{name}/bias"]


def norm(p: Params, name: str, x: Array) -> Array:
    """Return layer normalization, computed in f32."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    normed = wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    return normed.astype(x.dtype) * p[f"{name}/gamma"] + p[f"{name}/beta"]


def wide_layer(p: Params, name: str, x: Array) -> Array:
    """Apply the MLP, whose inner width is four times as large."""
    y = jax.nn.gelu(linear(p, f"{name}/linear_0", norm(p, f"{name}/layer_norm", x)), False)
    return linear(p, f"{name}/linear_1", y)


def heads(x: Array, count: int) -> Array:
    """Split `[length, width]` into `[heads, length, width of a head]`."""
    return x.reshape(len(x), count, -1).swapaxes(0, 1)


def attend(query: Array, key: Array, value: Array, is_seen: Array | bool = True) -> Array:
    """Return the attention of queries `[heads, length, width of a head]`: `[length, width]`."""
    scores = query @ key.swapaxes(1, 2) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(is_seen, scores.astype(jnp.float32), -jnp.inf))
    mixed = weights.astype(value.dtype) @ value
    return mixed.swapaxes(0, 1).reshape(mixed.shape[1], -1)


def encode(p: Params, config: Config, sound: Array) -> Array:
    """Encode a spectrogram `[3000, 80]` to `[1500, width]`."""
    x = sound.T[None].astype(p["encoder/layer_norm/gamma"].dtype)
    for name, stride in (("encoder/conv1", 1), ("encoder/conv2", 2)):
        x = lax.conv_general_dilated(x, p[f"{name}/weight"], (stride,), ((1, 1),))
        x = jax.nn.gelu(x + p[f"{name}/bias"][:, None], approximate=False)
    x = x[0].T + p["encoder/position_encodings/encodings"]
    for i in range(config.encoder_layers):
        name = f"encoder/layer_{i}"
        y = norm(p, f"{name}/self_attention/layer_norm", x)
        q, k, v = jnp.split(linear(p, f"{name}/self_attention/linear_0", y), 3, 1)
        y = attend(*(heads(part, config.num_heads) for part in (q, k, v)))
        x = x + linear(p, f"{name}/self_attention/linear_1", y)
        x = x + wide_layer(p, f"{name}/ffn", x)
    return norm(p, "encoder/layer_norm", x)


class Cache(NamedTuple):
    """The keys and values of the decoder: for the text so far, and for the sound.

    Each is `[heads, room, width of a head]`.
    """

    text: tuple[tuple[Array, Array], ...]
    sound: tuple[tuple[Array, Array], ...]


def begin(p: Params, config: Config, encoded: Array, room: int) -> Cache:
    """Return a cache with room for `room` tokens, and the keys and values of the sound."""
    sound = []
    for i in range(config.decoder_layers):
        both = jnp.split(linear(p, f"decoder/layer_{i}/attention/linear_1", encoded), 2, 1)
        sound.append(tuple(heads(part, config.num_heads) for part in both))
    empty = jnp.zeros((config.num_heads, room, encoded.shape[1] // config.num_heads), encoded.dtype)
    return Cache(((empty, empty),) * config.decoder_layers, tuple(sound))


def decode(
    p: Params, config: Config, tokens: Array, cache: Cache, start: Array | int
) -> tuple[Array, Cache]:
    """Return the logits of each next token, `[length, vocabulary]`, and the cache."""
    positions = start + jnp.arange(len(tokens))
    encodings = p["decoder/position_encodings/encodings"][positions]
    x, text = p["decoder/embeddings/weight"][tokens] + encodings, []
    for i, (cached, sound) in enumerate(zip(cache.text, cache.sound, strict=True)):
        name = f"decoder/layer_{i}"
        y = norm(p, f"{name}/self_attention/layer_norm", x)
        parts = jnp.split(linear(p, f"{name}/self_attention/linear_0", y), 3, 1)
        q, k, v = (heads(part, config.num_heads) for part in parts)
        k, v = (
            lax.dynamic_update_slice(old, new, (0, start, 0))
            for old, new in zip(cached, (k, v), strict=True)
        )
        is_seen = jnp.arange(k.shape[1]) <= positions[:, None]
        x = x + linear(p, f"{name}/self_attention/linear_1", attend(q, k, v, is_seen))
        y = norm(p, f"{name}/attention/layer_norm", x)
        q = heads(linear(p, f"{name}/attention/linear_0", y), config.num_heads)
        x = x + linear(p, f"{name}/attention/linear_2", attend(q, *sound))
        x = x + wide_layer(p, f"{name}/ffn", x)
        text.append((k, v))
    x = norm(p, "decoder/layer_norm", x)
    return x @ p["decoder/embeddings/weight"].T, Cache(tuple(text), cache.sound)


def transcribe(p: Params, config: Config, sound: Array, *, count: int = 96) -> Array:
    """Return the most likely tokens for a spectrogram, `[count]`, padded with END."""
    cache = begin(p, config, encode(p, config, sound), count + 2)
    prompt = jnp.array([START, SILENT_TIMES])
    found, cache = decode(p, config, prompt, cache, 0)

    def chosen(logits: Array, suppressed: tuple[int, ...]) -> Array:
        return logits.at[jnp.array(suppressed, int)].set(-jnp.inf).argmax().astype(jnp.int32)

    token = chosen(found[-1], config.suppressed + config.suppressed_first)
    written = jnp.full(count, END, jnp.int32).at[0].set(token)

    def more(state: Any) -> Array:
        step, written, _ = state
        return (step < count) & (written[step - 1] != END)

    def write(state: Any) -> Any:
        step, written, cache = state
        last = lax.dynamic_slice(written, (step - 1,), (1,))
        found, cache = decode(p, config, last, cache, step + 1)
        return step + 1, written.at[step].set(chosen(found[0], config.suppressed)), cache

    return lax.while_loop(more, write, (jnp.int32(1), written, cache))[1]


# A folder of CTranslate2.

_DTYPES = ("float32", "int8", "int16", "int32", "float16", "bfloat16")


def load(folder: Path) -> tuple[dict[str, np.ndarray], Config]:
    """Read `model.bin` and `config.json` of an English model with float weights.

    **Raises:** `ValueError` if the model is of another kind or quantized.
    """
    params = read_ctranslate2(folder / "model.bin")
    if any(name.endswith("_scale") for name in params):
        raise ValueError(f"{folder} is quantized already")
    entries = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layers = {m[0] for name in params if (m := re.match(r"(encoder|decoder)/layer_\d+", name))}
    count = lambda part: sum(layer.startswith(part) for layer in layers)
    return params, Config(
        int(params["encoder/num_heads"]),
        count("encoder"),
        count("decoder"),
        tuple(entries.get("suppress_ids", ())),
        tuple(entries.get("suppress_ids_begin", ())),
    )


def read_ctranslate2(path: Path) -> dict[str, np.ndarray]:
    """Read the variables of a `model.bin` of version 5 or 6."""
    content, place = path.read_bytes(), 0

    def take(kind: str) -> Any:
        nonlocal place
        (value,) = struct.unpack_from(f"<{kind}", content, place)
        place += struct.calcsize(f"<{kind}")
        return value

    def text() -> str:
        size = take("H")
        return take(f"{size}s").removesuffix(b"\0").decode()

    try:
        version, kind, _ = take("I"), text(), take("I")
        if version not in (5, 6) or kind != "WhisperSpec":
            raise ValueError(f"{path} is a {kind} of version {version}, and no Whisper of 5 or 6")
        variables = {}
        for _ in range(take("I")):
            name = text()
            shape = [take("I") for _ in range(take("B"))]
            dtype, size = jnp.dtype(_DTYPES[take("B")]), take("I")
            variables[name] = np.frombuffer(take(f"{size}s"), dtype).reshape(shape)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not CTranslate2's, or is truncated: {error}") from error
    return variables


def main(folder: Path, file: Path) -> None:
    """Transcribe a sound file, computing in f32."""
    from tokenizers import Tokenizer

    stored, config = load(folder)
    params = {k: jnp.asarray(v, jnp.float32) for k, v in stored.items() if v.dtype.kind == "f"}
    tokens = jax.jit(transcribe, static_argnums=1)(params, config, spectrogram(read_wav(file)))
    print(Tokenizer.from_file(str(folder / "tokenizer.json")).decode(np.asarray(tokens).tolist()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Transcribe English speech.")
    parser.add_argument("folder", type=Path, help="of CTranslate2: model.bin, tokenizer.json, ...")
    parser.add_argument("file", type=Path, help="a WAV file of at most 30 seconds")
    given = parser.parse_args()
    main(given.folder, given.file)
