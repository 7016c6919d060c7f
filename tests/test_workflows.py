"""Check the workflows of GitHub Actions, and the files that they share with make and pip."""

import re
import runpy
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import veneer as vn

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)*")


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def load(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / name)))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(path):
    used = re.findall(r"^\s*(?:- )?uses: (.*)$", path.read_text("utf-8"), re.MULTILINE)
    assert used or path.name == "nightly.yml"
    assert not [action for action in used if not PINNED.fullmatch(action)]


def test_an_action_has_the_same_commit_everywhere():
    pins = re.findall(r"uses: ([\w./-]+)@(.*)", "".join(map(Path.read_text, WORKFLOWS)))
    assert len(set(pins)) == len({action for action, _ in pins})


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_jobs_have_read_permissions_unless_stated(path):
    text = path.read_text("utf-8")
    assert "\npermissions:\n  contents: read\n" in text
    granted = re.findall(r"^ *(?:permissions: *\S.*|[\w-]+: write.*)$", text, re.MULTILINE)
    assert not [line for line in granted if not re.fullmatch(r" {6}[\w-]+: write # \w.*", line)]
    jobs = re.findall(r"^    runs-on: ", text, re.MULTILINE)
    assert len(re.findall(r"^    timeout-minutes: \d+$", text, re.MULTILINE)) == len(jobs)


def test_workflows_run_targets_of_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    commands = re.findall(
        r"run: make (.*)$", "\n".join(map(Path.read_text, WORKFLOWS)), re.MULTILINE
    )
    used = [word for command in commands for word in command.split() if "=" not in word]
    used += re.findall(r"^ *make ([a-z][a-z-]*)", read(".ci/run"), re.MULTILINE)
    assert {"setup", "lint", "test", "test-slow"} <= set(used) <= targets


def test_every_target_is_phony():
    makefile = read("Makefile")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert set(phony.split()) == set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_ci_tests_the_oldest_versions():
    project = tomllib.loads(read("pyproject.toml"))["project"]
    jax = load(".ci/lock.py").oldest_jax(project["dependencies"])
    python = project["requires-python"].removeprefix(">=")
    row = f'{{python: "{python}", jax: jax=={jax}, constraints: .ci/constraints-oldest.txt}}'
    assert row in read(".github/workflows/ci.yml")
    assert f"oldest_jax={jax}\n" in read(".ci/run")
    assert f"\njax=={jax}\n" in read(".ci/constraints-oldest.txt")


def test_the_extras_are_only_for_users():
    metadata = tomllib.loads(read("pyproject.toml"))
    users = {"interop", "cli", "demo", "numba", "examples", "pytensor", "units"}
    assert set(metadata["project"]["optional-dependencies"]) == users
    assert {"build", "docs", "test", "dev", "bench", "peers"} <= set(metadata["dependency-groups"])


def test_the_version_can_be_released(tmp_path, monkeypatch, capsys):
    release = load(".ci/release.py")
    tag = f"v{vn.__version__}"
    assert release.problems_of(tag) == []
    (problem,) = release.problems_of("v0.0.1")
    assert problem == f"the tag must be {tag}, as veneer.__version__ says, and not 'v0.0.1'"
    notes = tmp_path / "notes.md"
    monkeypatch.setattr("sys.argv", ["release.py", tag, str(notes)])
    release.main()
    text = notes.read_text("utf-8")
    assert text in read("CHANGELOG.md")
    assert "\n## " not in text
