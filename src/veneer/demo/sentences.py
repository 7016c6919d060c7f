"""English sentences that every Python carries: the prose of its own language reference.

`pydoc_data.topics` is the text behind `help("lambda")`: no download, no data set of our own. Its
wording changes a little from one Python to the next, and so does this list.
"""

import re
from collections.abc import Iterator
from pydoc_data.topics import topics

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
# A sentence opens with a capital, ends with a full stop, and holds words (names such as "while" in
# quotes) and the marks of prose; operators, stars and brackets are code, grammar and footnotes.
_PROSE = re.compile(r"""[A-Z](?:[A-Za-z0-9 ,;:'’–()-]|"[A-Za-z_]+")*[a-z]{2}\.""")
_WORDS = range(6, 33)


def _paragraphs(topic: str) -> Iterator[str]:
    """Yields a topic's paragraphs on a line each: blocks of lines that share one indentation."""
    for block in topic.split("\n\n"):
        lines = block.strip("\n").splitlines()
        if len({len(line) - len(line.lstrip()) for line in lines}) == 1:
            yield " ".join(line.strip() for line in lines).replace("- ", "-")  # broken at a hyphen


def sentences(count: int = 512) -> list[str]:
    """Returns `count` of the reference's sentences, evenly spread from the first to the last.

    Each has 6 to 32 words, no code, and occurs once. The same Python always gives the same list.

    **Raises:** `ValueError` where the reference holds fewer than `count` such sentences.

    >>> from veneer.demo.sentences import sentences
    >>> len(sentences(512)), len(set(sentences(512)))
    (512, 512)
    """
    found = dict.fromkeys(  # a dict is a set that remembers the order
        sentence
        for name in sorted(topics)
        for paragraph in _paragraphs(topics[name])
        for sentence in _SENTENCE_END.split(paragraph)
        if _PROSE.fullmatch(sentence) and len(sentence.split()) in _WORDS
    )
    if len(found) < count:
        raise ValueError(f"pydoc_data.topics holds {len(found)} sentences, fewer than {count}.")
    ordered = list(found)
    return [ordered[i * len(ordered) // count] for i in range(count)]
