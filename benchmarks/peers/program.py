"""What the program of each library does: it measures, and prints what it found as JSON."""

import json

from dispatch import Library, eager, equations, tracing
from import_time import import_times
from measure import measure, parser


def run(module: str, library: Library) -> None:
    """Measures a library, imported as `module`, and prints `{what: figure}`."""
    rounds = parser(None).parse_args().rounds
    traced = tracing(library)
    results = measure(traced, rounds=rounds, batches=3)
    results += measure(eager(library), rounds=rounds, batches=20, calls=50)
    figures = {f"{r.claim.ours.name} / {r.claim.theirs.name}": f"{r.ratio:.2f}" for r in results}
    ours, theirs = equations(traced[0])
    figures["its equations / those written by hand"] = f"{ours} / {theirs}"
    _, seconds = import_times(module, rounds=rounds)
    figures["import, once JAX is imported"] = f"{seconds * 1e3:.0f} ms"
    print(json.dumps(figures))
