"""The text that users meet first: docstrings of public names, and messages."""

import inspect
from pathlib import Path

from support.plain_english import (
    british_words,
    hard_words,
    messages,
    public_members,
    public_objects,
)

import veneer as vn

MODULES = [
    vn,
    *[vn.quant, vn.types, vn.tree, vn.lora, vn.hijax, vn.numba, vn.distributed, vn.testing],
]
OBJECTS = {f"{m.__name__}.{name}": value for m in MODULES for name, value in public_objects(m)}
FUNCTIONS = {
    name: x for name, x in OBJECTS.items() if inspect.isfunction(x) and "veneer" in x.__module__
}
CLASSES = {name: x for name, x in OBJECTS.items() if inspect.isclass(x)}
NOT_A_VERB = {"The", "A", "An", "What", "Whether", "Of", "Where", "By", "Has", "Have"}
HARD_PER_WORD = 1.5 / 1000  # a few are the right word


def docstrings():
    """Return the docstrings of all public names and of the members of public classes."""
    texts = {module.__name__: module.__doc__ or "" for module in MODULES}
    texts |= {name: inspect.getdoc(x) or "" for name, x in OBJECTS.items()}
    for name, cls in CLASSES.items():
        for member, function in public_members(cls):
            texts[f"{name}.{member}"] = inspect.getdoc(function) or ""
    return texts


def has_example(name):
    """Return whether a docstring has an example. The example of a function must call it."""
    _, found, example = (inspect.getdoc(OBJECTS[name]) or "").partition(">>>")
    return found and (name in CLASSES or name.rpartition(".")[2] in example)


def undocumented(function):
    """Yield the parts that the docstring of a function lacks."""
    text = inspect.getdoc(function) or ""
    verb = text.split(" ", 1)[0]
    if verb in NOT_A_VERB or (verb.endswith("s") and not verb.endswith("ss")):
        yield "an imperative verb"
    for name in inspect.signature(function).parameters:
        if f"`{name}`" not in text and f"*{name}`" not in text:
            yield name
    returns = inspect.signature(function).return_annotation not in (None, "None")
    if returns and "**Returns:**" not in text:
        yield "Returns"


def test_every_public_module_lists_its_names():
    assert all(module.__all__ for module in MODULES)


def test_every_public_name_has_an_example():
    assert not [name for name in {**FUNCTIONS, **CLASSES} if not has_example(name)]


def test_functions_document_their_arguments_and_results():
    lacking = {name: list(undocumented(function)) for name, function in FUNCTIONS.items()}
    assert not {name: parts for name, parts in lacking.items() if parts}


def test_classes_begin_with_a_noun_phrase():
    texts = {name: inspect.getdoc(cls) or "" for name, cls in CLASSES.items()}
    assert not [name for name, text in texts.items() if not text.startswith(("A ", "An ", "The "))]


def test_every_public_member_has_a_docstring():
    assert not [name for name, text in docstrings().items() if not text]


def test_public_docstrings_are_easy_to_read():
    texts = docstrings()
    hard = {name: hard_words(text) for name, text in texts.items() if hard_words(text)}
    words = len(" ".join(texts.values()).split())
    assert sum(map(len, hard.values())) <= HARD_PER_WORD * words, hard
    assert not {name: british_words(text) for name, text in texts.items() if british_words(text)}


def test_error_messages_are_easy_to_read():
    files = sorted(Path(vn.__file__).parent.rglob("*.py"))
    texts = {(f.name, line, text): text for f in files for line, text in messages(f)}
    assert len(texts) > 1000
    hard = {place: hard_words(text) for place, text in texts.items() if hard_words(text)}
    words = len(" ".join(texts.values()).split())
    assert sum(map(len, hard.values())) <= HARD_PER_WORD * words, hard
    british = {place: british_words(text) for place, text in texts.items() if british_words(text)}
    assert {file for file, *_ in british} <= {"manifest.py"}  # files that we saved have its words
