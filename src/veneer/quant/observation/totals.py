"""What a Box keeps of the activations that one weight meets: a `Recording`, as arrays of JAX's.

In float32, and counts in int32, where the host has float64. All arrays of one kind are one array,
for each is an operand of every program that writes them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .recording import Recording


class Totals(NamedTuple):
    """What has been added up so far.

    **Arguments:**

    - `counts`: of values of each channel, `[channels]`.
    - `ends`: the least and the largest value of each channel, `[2, channels]`.
    - `sums`: of values, magnitudes and squares, `[3, channels]`.
    - `ranges`: of each stack of channels, the ends of the range in this batch, their sums over
      batches and their exponential averages, `[3, 2, stacks]`.
    - `batches`: those in which a stack has met anything, `[stacks]`.
    - `gram`: sums of products of two channels, `[stacks, K, K]`, or None.
    """

    counts: jax.Array
    ends: jax.Array
    sums: jax.Array
    ranges: jax.Array
    batches: jax.Array
    gram: jax.Array | None


def totals_of(recording: Recording) -> Totals:
    """Totals of nothing yet."""
    channels, stacks = len(recording.count), len(recording.batches)
    ends = jnp.array([[np.inf], [-np.inf]], jnp.float32)
    zeros = jnp.zeros((2, 2, stacks), jnp.float32)
    width = int(recording.channel.max(initial=0)) + 1
    return Totals(
        counts=jnp.zeros(channels, jnp.int32),
        ends=jnp.broadcast_to(ends, (2, channels)),
        sums=jnp.zeros((3, channels), jnp.float32),
        ranges=jnp.concatenate([jnp.broadcast_to(ends, (1, 2, stacks)), zeros]),
        batches=jnp.zeros(stacks, jnp.int32),
        gram=None if recording.grams is None else jnp.zeros((stacks, width, width), jnp.float32),
    )


def added(
    totals: Totals, recording: Recording, rows: int, positions: Any, low: Any, high: Any, *sums: Any
) -> Totals:
    """The totals with the activations of one product, as `Recording.add` takes them."""
    low, high, *parts = (jnp.asarray(x, jnp.float32) for x in (low, high, *sums))
    # XLA's reduction to a maximum may drop NaN.
    low, high = (jnp.where(jnp.isnan(parts[0]), jnp.nan, x) for x in (low, high))
    at, stack = positions.ravel(), jnp.asarray(recording.stack)[positions]
    ranges = totals.ranges.at[0, 0, stack.ravel()].min(low.ravel())
    return Totals(
        counts=_counted(totals.counts, at, rows),
        ends=totals.ends.at[0, at].min(low.ravel()).at[1, at].max(high.ravel()),
        sums=totals.sums.at[:, at].add(jnp.stack([part.ravel() for part in parts[:3]])),
        ranges=ranges.at[0, 1, stack.ravel()].max(high.ravel()),
        batches=totals.batches,
        gram=_with_products(totals, recording, positions, stack, *parts[3:]),
    )


def _counted(counts: jax.Array, at: Any, rows: int) -> jax.Array:
    """Counts with more, up to the largest there is."""
    more = counts.at[at].add(rows)
    return jnp.where(more < counts, jnp.iinfo(counts.dtype).max, more)


def _with_products(
    totals: Totals, recording: Recording, positions: Any, stack: Any, *products: Any
) -> jax.Array | None:
    if totals.gram is None or not products:
        return totals.gram
    channel = jnp.asarray(recording.channel)[positions]
    among = stack[:, :, None] == stack[:, None, :]
    at = (stack[:, :, None], channel[:, :, None], channel[:, None, :])
    return totals.gram.at[at].add(jnp.where(among, products[0], 0))


def ended(totals: Totals, decay: float) -> Totals:
    """The totals once a batch is over, as `Recording.end_batch`."""
    ends, summed, moving = totals.ranges
    met = ~(ends[0] > ends[1])  # as they are until something comes; NaN is not
    first = totals.batches == 0
    moved = jnp.where(first, ends, decay * moving + (1 - decay) * ends)
    nothing = jnp.broadcast_to(jnp.array([[np.inf], [-np.inf]], ends.dtype), ends.shape)
    summed = jnp.where(met, summed + ends, summed)
    return totals._replace(
        ranges=jnp.stack([nothing, summed, jnp.where(met, moved, moving)]),
        batches=totals.batches + met,
    )


def store(totals: Totals, recording: Recording) -> None:
    """Has a recording be of these totals."""
    wide = lambda x: np.asarray(x, float)
    recording.count = wide(totals.counts)
    recording.minimum, recording.maximum = wide(totals.ends)
    recording.sums, recording.batches = wide(totals.sums), wide(totals.batches)
    _, recording.total, recording.moving = wide(totals.ranges)
    if totals.gram is not None:
        met = np.flatnonzero(recording.batches)
        recording.grams = {int(i): wide(totals.gram[i]) for i in met}
