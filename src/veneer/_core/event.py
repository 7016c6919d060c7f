"""`Event`, a record of a primitive that ran on implicit operands, and its error and warning."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

#: The paths of the weights that a value comes from. A program that is traced once may be called
#: with other weights. So in its events, an integer `i` means the source of operand `i` of the call.
Source = tuple[str | int, ...]

#: The path of a weight that is neither in an argument nor a captured variable, so it has no name.
FOUND = "an array that the program found"

#: The value of `Event.how` for an eager operation that ran before the reported program.
BEFORE_CALL = "before the call"


class MaterialiseError(TypeError):
    """The error for a primitive that would materialize an operand.

    `vn.implicit` raises it with `on_materialise="error"` or `"error_weights"`, if a primitive has
    no rule or its rule materializes an operand. The message names the primitive, its operands, the
    line of the program and the number of bytes.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(2), "int8")
    >>> try:
    ...     vn.implicit(jnp.sin, on_materialise="error")(w)
    ... except vn.MaterialiseError as error:
    ...     print(str(error)[:19])
    sin(QArray:f32[2,2]
    """


class MaterialiseWarning(UserWarning):
    """The warning that a primitive materialized an operand.

    `vn.implicit` emits it with `on_materialise="warn"` or `"warn_weights"`, if a primitive has no
    rule or its rule materializes an operand. The message names the primitive, its operands, the
    line of the program and the number of bytes.

    >>> import warnings
    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(2), "int8")
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     y = vn.implicit(jnp.sin, on_materialise="warn")(w)
    >>> caught[0].category.__name__
    'MaterialiseWarning'
    """


class Operands(NamedTuple):
    """A description of the operands of a primitive, with one entry per operand in each field."""

    shown: tuple[str, ...]  # the display text, such as "QArray:f32[2,2]"
    sources: tuple[Source, ...]  # the paths of the weights that the operand comes from
    dense: tuple[int, ...]  # the bytes of the dense array; 0 for an operand that is not implicit
    caches: tuple[bool, ...]  # whether the operand is a key-value cache


@dataclass(frozen=True, slots=True)
class Event:
    """A record of a primitive that ran on an implicit operand.

    `vn.explain` collects events in a `vn.Report`. If the argument `on_materialise` of `vn.implicit`
    is a function, `vn.implicit` calls it with each event that materializes an operand.

    | attribute | content |
    |---|---|
    | `primitive` | the name of the primitive |
    | `operands` | the types of the operands, such as `"QArray:f32[2,2]"` |
    | `rule` | file and line of the rule that ran; None if no rule fitted |
    | `how` | how the rule computed the result, or why no rule fitted; `""` if unknown |
    | `nbytes` | the number of bytes that were materialized |
    | `line` | file and line of the user's program |
    | `dense` | for each operand, the number of bytes that were materialized |
    | `caches` | for each operand, whether it is a key-value cache |
    | `sources` | for each operand, the paths of the weights that it comes from |
    | `weights` | the paths of all weights in `sources` |
    | `no_kernel` | a text that names the operand that is too small for a kernel; else `""` |

    A weight is an implicit array that is an argument or a captured variable of the program. A slice
    or a transpose of a weight counts as the weight. Other implicit arrays are intermediates.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(2), "int8")
    >>> event = vn.explain(lambda w: jnp.sin(w))(w).events[0]
    >>> event.primitive, event.operands, event.rule, event.nbytes, event.weights
    ('sin', ('QArray:f32[2,2]',), None, 16, ('w',))
    """

    primitive: str
    operands: tuple[str, ...]
    rule: str | None
    nbytes: int
    line: str
    how: str = ""
    sources: tuple[Source, ...] = ()
    dense: tuple[int, ...] = ()
    caches: tuple[bool, ...] = ()
    no_kernel: str = ""

    @property
    def made_dense(self) -> bool:
        """True if an operand was materialized."""
        return self.rule is None or self.nbytes > 0

    @property
    def weights(self) -> tuple[str, ...]:
        """The paths of all weights in `sources`, without repetition."""
        return paths_of(join_sources(self.sources))

    @property
    def weight_nbytes(self) -> int:
        """The number of bytes that were materialized from weights, including key-value caches."""
        return sum(n for n, source in zip(self.dense, self.sources, strict=True) if source)

    @property
    def cache_nbytes(self) -> int:
        """The number of bytes that were materialized from key-value caches."""
        operands = zip(self.dense, self.sources, self.caches, strict=True) if self.caches else ()
        return sum(n for n, source, is_cache in operands if source and is_cache)

    @property
    def how_and_why(self) -> str:
        """The texts `how` and `no_kernel`, joined with a comma."""
        return ", ".join(filter(None, (self.how, self.no_kernel)))

    def met_by(self, sources: Sequence[Source], line: str) -> "Event":
        """Return a copy of this event of a traced program for one call of the program.

        `sources[i]` are the paths of the weights that operand `i` of the call comes from. `line` is
        the file and line of the call.
        """
        own_sources = tuple(resolve_source(source, sources) for source in self.sources)
        return replace(self, line=line, sources=own_sources)

    def __str__(self) -> str:
        weights = f", of {', '.join(self.weights)}" if self.weights else ""
        call = f"{self.primitive}({', '.join(self.operands)}) at {self.line}{weights}"
        if self.rule is not None:
            cost = f"{self.nbytes:,} bytes are materialized" if self.nbytes else ""
            texts = (f"rule {self.rule}", self.how_and_why, cost)
            return f"{call}: {', '.join(filter(None, texts))}"
        why = f": {self.how}" if self.how else ""
        return f"{call}: no rule fits{why}, so {self.nbytes:,} bytes are materialized"


def paths_of(source: Source) -> tuple[str, ...]:
    """Return the weight paths in a source, without the integers for operands (see `Source`)."""
    return tuple(x for x in source if isinstance(x, str))


def resolve_source(source: Source, operands: Sequence[Source]) -> Source:
    """Replace each integer `i` in a source by `operands[i]`, the source of operand `i` of a call.

    Keep `FOUND`, the path of weights without a name. Drop the other paths: they name the weights of
    the call that was traced, and `operands` has the paths of this call.
    """
    sources = [operands[i] for i in source if isinstance(i, int)]
    return join_sources([*sources, (FOUND,)] if FOUND in source else sources)


def join_sources(sources: Iterable[Source]) -> Source:
    """Return the union of some tuples of weight paths, in order and without repetition."""
    return tuple(dict.fromkeys(x for source in sources for x in source))
