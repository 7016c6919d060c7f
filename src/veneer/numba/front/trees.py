"""Trees of arguments and results: taken apart and built by code written for their one structure.

JAX's own functions do it for any structure, and take longer than many a compiled program.
"""

from collections.abc import Callable, Iterator
from typing import Any

from jax.tree_util import tree_flatten, tree_unflatten, treedef_is_leaf


def caller(entry: Callable[..., Any], in_tree: Any, out_tree: Any) -> Callable[..., Any]:
    """A function of trees, of one that takes all leaves and returns a leaf, or a tuple of them.

    **Raises:** `TypeError`, as it is called with another structure.
    """
    arguments = in_tree.children()
    if all(map(_is_leaf, arguments)) and _is_leaf(out_tree):
        return entry

    def call_any(*args: Any) -> Any:
        leaves, tree = tree_flatten(args)
        if tree != in_tree:
            raise TypeError(f"The arguments must have the structure {in_tree}, not {tree}.")
        results = entry(*leaves)
        return tree_unflatten(out_tree, results if type(results) is tuple else (results,))

    written = _written(arguments, out_tree)
    if written is None:
        return call_any
    names = {"entry": entry, "call_any": call_any}
    exec(written, names)
    return names["call"]


def _written(arguments: list[Any], out_tree: Any) -> str | None:
    """The source of a function for trees of tuples, lists and dicts, or None for others."""
    names = [f"x{n}" for n in range(len(arguments))]
    reader = _Reader()
    leaves = [
        leaf
        for name, tree in zip(names, arguments, strict=True)
        for leaf in reader.read(name, tree)
    ]
    results = [f"y{n}" for n in range(out_tree.num_leaves)]
    built = _built(out_tree, iter(results))
    if built is None or reader.stuck:
        return None
    called = f"entry({', '.join(f'leaf{n}' for n in range(len(leaves)))})"
    # They are read here, as a dict may have other keys.
    read = [f"            leaf{n} = {place}" for n, place in enumerate(leaves)]
    # A program of one result returns it, one of several a tuple of them.
    left = f"{', '.join(results)} = " if results else ""
    return "\n".join([
        f"def call({', '.join(names)}):",
        "    try:",
        f"        fits = {' and '.join(reader.checks) or 'True'}",
        "        if fits:",
        *(read or ["            pass"]),
        "    except KeyError:",
        "        fits = False",
        "    if not fits:",
        f"        return call_any({', '.join(names)})",
        f"    {left}{called}",
        f"    return {built}",
    ])  # fmt: skip


class _Reader:
    """Writes what it takes to read the leaves of trees, and to check that they are such trees."""

    def __init__(self) -> None:
        self.checks: list[str] = []
        self.stuck = False
        self._n_nodes = 0

    def read(self, place: str, tree: Any) -> Iterator[str]:
        """Expressions for the leaves of the tree at a place."""
        if _is_leaf(tree):
            yield place
            return
        kind, keys = _kind(tree)
        if kind in (None, type(None)):
            self.checks.append(f"({place}) is None")
            return
        if kind not in (tuple, list, dict) or (kind is dict and not _plain(keys)):
            self.stuck = True
            return
        name, self._n_nodes = f"node{self._n_nodes}", self._n_nodes + 1
        children = tree.children()
        self.checks.append(f"type({name} := {place}) is {kind.__name__}")
        self.checks.append(f"len({name}) == {len(children)}")
        for n, child in enumerate(children):
            yield from self.read(f"{name}[{keys[n]!r}]" if kind is dict else f"{name}[{n}]", child)


def _kind(tree: Any) -> tuple[Any, Any]:
    """The class of the root of a tree, and the keys of a dict."""
    return tree.node_data() or (None, None)


def _is_leaf(tree: Any) -> bool:
    return bool(treedef_is_leaf(tree)) and tree.num_leaves == 1  # None is none


def _plain(keys: Any) -> bool:
    """Whether the source of keys is what they are shown as."""
    return all(type(key) in (str, int, bool) for key in keys)


def _built(tree: Any, leaves: Iterator[str]) -> str | None:
    """An expression for a tree of leaves."""
    if _is_leaf(tree):
        return next(leaves)
    kind, keys = _kind(tree)
    if kind in (None, type(None)):
        return "None"
    children = [_built(child, leaves) for child in tree.children()]
    if None in children:
        return None
    if kind is dict and _plain(keys):
        pairs = zip(keys, children, strict=True)
        return f"{{{', '.join(f'{key!r}: {child}' for key, child in pairs)}}}"
    if kind is tuple:
        return f"({''.join(f'{child}, ' for child in children)})"
    return f"[{', '.join(map(str, children))}]" if kind is list else None
