"""High types: implicit arrays as operands of plain JAX functions, with no decorator.

    with vn.hijax.enabled():  # or vn.hijax.install(), for good
        jax.jit(model)(params, x)

`vn.implicit` runs rules while a function is traced; here JAX's own tracers carry types of ours, a
jaxpr has one `dot_general` on an operand of type `q8[4096,11008]`, and the rule runs when that is
lowered. The rules are the same.

How a value meets a program, and why so:

- *Arguments and results are trees.* `jax.jit`, `vmap`, `scan`, `optax`, `equinox` and `nnx` flatten
  an implicit array into its leaves, as without the mode. JAX's registries of trees cannot forget a
  class, nor could they without harm: an optimiser's step maps over leaves, inside of `jit` too, and
  `b1 * moment` of a LoRA weight as one typed value would be the rule for a product of weights. So
  gradients of leaves, shardings, donation and exports are JAX's own, and a call of a jitted
  function costs what its leaves cost.
- *A primitive sees one value.* Where an implicit array is an operand, its leaves are packed: an
  equation `lora[512,512] = pack w a b`, and what primitives make of that stays typed. Where nothing
  is staged, it is the value itself. `jax.numpy` takes operands that have `__jax_array__`, which
  gives the typed value and nothing dense. So a class needs neither `jax.Array` for a base nor a
  metaclass, and those of `equinox.Module` and `flax.struct` do as they are.
- *Two kinds of derivatives.* Those of a value's leaves are as for any tree; a derivative through
  the typed value is that of its rule. A class with `dense_tangent = True` (`QArray`) is one leaf
  for `jax.grad`, `vjp`, `jvp` and `linearize`: its tangent is a dense array, and the derivative is
  that of the program, straight through the rounding.
- *There is one primitive*, `high`, of operations: a primitive of JAX's by its rule, a function of a
  user's (`primitive`), and the derivatives and maps of both. An operation is run once it is
  evaluated or lowered; jaxprs print it under its own name.
- *Loops and branches* take values in both forms, and bring what meets there into one.

The modules, each of which imports those above it alone:

    patching            attributes of another package's, set and restored exactly
    mode                whether high types are on: install, uninstall, enabled
    values              what stands for a value where JAX handles it, and values taken apart
    high                the one primitive, and the operations that make values of leaves
    types               the types that JAX sees, and values as operands of their types
    operations          a primitive by its rule, and its derivatives and maps
    high_rules          what JAX asks of the primitive: evaluation, types, derivatives, batching
    mapping             what goes over an axis of a value: vmap, and scans
    collectives         what devices combine
    custom_derivatives  the rules of jax.custom_vjp and jax.custom_jvp
    control_flow        loops and branches, where values meet in both forms
    shard_map           operands of `jax.shard_map`, leaf by leaf
    results             results of jitted functions, which are trees of leaves again
    frameworks          parameters of Flax linen, and updates by optimisers
    box                 a place that programs read and write
    jit                 `vn.jit`: `jax.jit` for functions of implicit arrays and of Boxes
    patches             all changes that the mode makes in JAX, in one list
    custom_primitives   primitives of a user's own
"""

from . import high_rules as high_rules
from . import patches as patches
from .box import Box
from .custom_primitives import primitive
from .mode import enabled, install, is_enabled, uninstall

__all__ = ["Box", "enabled", "install", "is_enabled", "primitive", "uninstall"]


def __dir__() -> list[str]:
    return __all__
