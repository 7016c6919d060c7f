"""Measure the time to trace a transformer of 12 layers with implicit weights, and plain JAX.

Each trace uses a new function, as in the first call of a `jax.jit`. Nothing is compiled or run.
"""

from dispatch import tracing
from lora import VENEER
from measure import measure, parser, results_table

if __name__ == "__main__":
    arguments = parser(__doc__).parse_args()
    print(results_table(measure(tracing(VENEER), rounds=arguments.rounds, batches=3), "ms"))
