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

What is changed in JAX is listed in `patches`, and restored by `uninstall`.
"""

from .box import Box as Box
from .install import enabled as enabled
from .install import install as install
from .install import is_enabled as is_enabled
from .install import uninstall as uninstall
from .primitive import primitive as primitive
