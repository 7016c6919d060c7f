"""The Whisper of `examples/`: its sound, its layers, its loop, and its files."""

import json
import shutil
import struct
import wave

import dictation
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import whisper

import veneer as vn

CONFIG = whisper.Config(2, 2, 2, suppressed=(3, 5), suppressed_first=(7, whisper.END))
WIDTH, VOCABULARY = 16, whisper.SILENT_TIMES + 1
LINEAR = {
    "encoder": {"self_attention": ((3, 1), (1, 1))},
    "decoder": {"self_attention": ((3, 1), (1, 1)), "attention": ((1, 1), (2, 1), (1, 1))},
}


def variables():
    """The variables of a small model, by CTranslate2's names."""
    rng = np.random.default_rng(0)
    shapes = {
        "encoder/conv1/weight": (WIDTH, whisper.BANDS, 3),
        "encoder/conv2/weight": (WIDTH, WIDTH, 3),
        "encoder/conv1/bias": (WIDTH,),
        "encoder/conv2/bias": (WIDTH,),
        "encoder/position_encodings/encodings": (1500, WIDTH),
        "decoder/position_encodings/encodings": (32, WIDTH),
        "decoder/embeddings/weight": (VOCABULARY, WIDTH),
    }
    norms = ["encoder/layer_norm", "decoder/layer_norm"]
    for part, blocks in LINEAR.items():
        for i in range(2):
            for block, sizes in (blocks | {"ffn": ((4, 1), (1, 4))}).items():
                norms.append(f"{part}/layer_{i}/{block}/layer_norm")
                for j, (out, into) in enumerate(sizes):
                    name = f"{part}/layer_{i}/{block}/linear_{j}"
                    shapes[f"{name}/weight"] = (out * WIDTH, into * WIDTH)
                    shapes[f"{name}/bias"] = (out * WIDTH,)
    made = {k: rng.normal(size=s).astype(np.float16) * s[-1] ** -0.5 for k, s in shapes.items()}
    for name in norms:
        made |= {f"{name}/gamma": np.ones(WIDTH, "f2"), f"{name}/beta": np.zeros(WIDTH, "f2")}
    return made


@pytest.fixture(scope="module")
def params():
    return {k: jnp.asarray(v, jnp.float32) for k, v in variables().items()}


@pytest.fixture(scope="module")
def sound():
    return whisper.spectrogram(np.random.default_rng(1).normal(size=4000).astype(np.float32))


def test_mel_bands_are_triangles_of_area_one():
    bands = whisper.bands()
    assert bands.shape == (201, 80)
    assert (bands >= 0).all()
    np.testing.assert_allclose(bands[:, 40:].sum(0) * 40, 1, rtol=0.1)  # of 40 Hz each
    middles = np.arange(201)[bands.argmax(0)] * 40.0
    linear = middles[middles < 900]
    np.testing.assert_allclose(np.diff(linear).mean(), 37.4, rtol=0.05)  # 66.7 Hz of 45.2 mels
    high = middles[50:]
    steps = np.diff(np.log(high))
    np.testing.assert_allclose(steps.mean(), np.log(6.4) / 27 * 45.245 / 81, rtol=0.05)


def test_a_tone_is_in_its_band_and_silence_is_lowest():
    tone = np.sin(2 * np.pi * 1000 * np.arange(16_000) / 16_000).astype(np.float32)
    found = whisper.spectrogram(tone)
    assert found.shape == (3000, 80)
    middle = np.arange(201)[whisper.bands().argmax(0)] * 40
    assert abs(middle[int(found[50].argmax())] - 1000) <= 40
    assert float(found.max() - found.min()) == pytest.approx(2)  # 8 powers of ten, over 4
    assert (found[2000] == found.min()).all()


def test_attention_agrees_with_jax():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 8))
    mask = jnp.tril(jnp.ones((5, 5), bool))
    turned = (x.swapaxes(0, 1) for x in (q, k, v))
    expected = jax.nn.dot_product_attention(*turned, is_causal=True).reshape(5, -1)
    np.testing.assert_allclose(whisper.attend(q, k, v, mask), expected, atol=1e-6)


def test_reading_single_tokens_agrees_with_reading_at_once(params, sound):
    encoded = jax.jit(whisper.encode, static_argnums=1)(params, CONFIG, sound)
    assert encoded.shape == (1500, WIDTH)
    tokens = jnp.array([1, 9, 4, 2])
    at_once, _ = whisper.decode(
        params, CONFIG, tokens, whisper.begin(params, CONFIG, encoded, 6), 0
    )
    cache = whisper.begin(params, CONFIG, encoded, 6)
    for i in range(4):
        found, cache = whisper.decode(params, CONFIG, tokens[i : i + 1], cache, i)
        np.testing.assert_allclose(found[0], at_once[i], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("format", [None, ("int8", None), ("nf4", 16)])
def test_the_loop_writes_the_most_likely_allowed_tokens(params, sound, format):
    packed = dictation.quantize(params, format)
    run = jax.jit(vn.implicit(whisper.transcribe), static_argnums=1, static_argnames="count")
    found = np.asarray(run(packed, CONFIG, sound, count=4))
    dense = vn.materialise(packed)
    encoded = whisper.encode(dense, CONFIG, sound)
    tokens = [whisper.START, whisper.SILENT_TIMES]
    for i in range(4):
        cache = whisper.begin(dense, CONFIG, encoded, 8)
        logits = np.array(whisper.decode(dense, CONFIG, jnp.array(tokens), cache, 0)[0][-1])
        refused = CONFIG.suppressed + (CONFIG.suppressed_first if i == 0 else ())
        logits[list(refused)] = -np.inf
        tokens.append(int(logits.argmax()))
        if tokens[-1] == whisper.END:
            break
    written = tokens[2:] + [whisper.END] * (6 - len(tokens))
    assert found.tolist() == written


def write_ctranslate2(path, variables, version=6, kind="WhisperSpec"):
    text = lambda s: struct.pack("<H", len(s) + 1) + s.encode() + b"\0"
    parts = [struct.pack("<I", version), text(kind), struct.pack("<II", 3, len(variables))]
    for name, x in variables.items():
        shape = struct.pack(f"<B{x.ndim}I", x.ndim, *x.shape)
        code = whisper._DTYPES.index(x.dtype.name)
        parts += [text(name), shape, struct.pack("<BI", code, x.nbytes), x.tobytes()]
    path.write_bytes(b"".join(parts) + struct.pack("<I", 0))


def test_a_model_folder_is_loaded_and_checked(tmp_path):
    stored = variables() | {"encoder/num_heads": np.array(2, np.int16)}
    write_ctranslate2(tmp_path / "model.bin", stored)
    said = {"suppress_ids": [3, 5], "suppress_ids_begin": [7, whisper.END]}
    (tmp_path / "config.json").write_text(json.dumps(said))
    read, config = whisper.load(tmp_path)
    assert config == CONFIG
    assert all((read[name] == x).all() for name, x in stored.items())
    whole = (tmp_path / "model.bin").read_bytes()
    (tmp_path / "model.bin").write_bytes(whole[:5000])
    with pytest.raises(ValueError, match="is not CTranslate2's, or is truncated"):
        whisper.load(tmp_path)
    write_ctranslate2(tmp_path / "model.bin", {}, kind="TransformerSpec")
    with pytest.raises(ValueError, match="is a TransformerSpec of version 6, and no Whisper"):
        whisper.load(tmp_path)
    write_ctranslate2(tmp_path / "model.bin", {"a/weight_scale": np.ones(1, np.float32)})
    with pytest.raises(ValueError, match="is quantized already"):
        whisper.load(tmp_path)


def test_a_wav_file_is_read_and_checked(tmp_path):
    path = tmp_path / "tone.wav"
    tone = np.sin(2 * np.pi * 500 * np.arange(8000) / 8000)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(np.repeat(tone * 16_000, 2).astype("<i2").tobytes())
    read = whisper.read_wav(path)
    expected = np.sin(2 * np.pi * 500 * np.arange(16_000) / 16_000) * 16_000 / 32_768
    np.testing.assert_allclose(read[100:-100], expected[100:-100], atol=5e-3)


def test_the_word_error_rate_counts_edits():
    count = lambda said, written: dictation.count_wrong_words(said.split(), written.split())
    assert count("a b c", "a b c") == 0
    assert count("a b c", "a x c d") == 2
    assert count("", "a b") == count("a b", "") == 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
def test_dictation_writes_the_spoken_words(capsys):
    try:
        dictation.fetch(dictation.MODEL)
    except FileNotFoundError as error:  # neither a cache nor a network
        pytest.skip(str(error))
    dictation.main(["She opened the window and listened to the rain."])
    printed = capsys.readouterr().out
    assert "int4, tile 32" in printed
    assert "0 of 9" in printed
