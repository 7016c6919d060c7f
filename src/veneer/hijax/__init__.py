"""High types: implicit arrays as operands of plain JAX functions, without `vn.implicit`.

    with vn.hijax.enabled():  # or vn.hijax.install()
        jax.jit(model)(params, x)

`vn.implicit` runs rules while a function is traced. With high types, JAX's own tracers carry an
implicit array as one typed value: a jaxpr has a `dot_general` with an operand of type
`q8[4096,11008]`, and the rule runs when that equation is lowered. The rules are the same.

- *Arguments and results are pytrees of leaves* for `jax.jit`, `vmap`, `scan`, optax, Equinox and
  nnx, as without high types. For example, an optimizer maps over the leaves and runs no rules. So
  JAX itself handles gradients of leaves, shardings, donation and exports, and a call of a jitted
  function has no overhead.
- *A primitive takes an implicit array as one operand.* An equation `lora[512,512] = pack w a b`
  packs the leaves `w`, `a` and `b` into one typed value, and results stay typed. `jax.numpy` gets
  the typed value through `__jax_array__`, so a class needs no base class or metaclass of JAX.
- *Derivatives* with respect to leaves are the same as for any pytree. An array whose class sets
  `dense_tangent = True`, such as `QArray`, is one leaf for `jax.grad`, `vjp`, `jvp` and
  `linearize`. Derivatives are taken with respect to its dense array, so its tangents and
  gradients are dense arrays.
- *One primitive*, `high`, represents all operations: JAX primitives that run rules, functions made
  by `vn.hijax.primitive`, and their derivatives and batched forms. Jaxprs print the name of the
  operation.
- *Loops and branches* accept typed values and pytrees of leaves. If two branches return different
  forms, or a loop's body changes the form of its carry, both are converted to one form.

The modules. Each imports only modules above it:

    mode                turn high types on and off, with the patches of JAX
    values              implicit arrays as JAX handles them, and the primitive `high`
    types               the types of implicit arrays in jaxprs
    operations          JAX primitives on typed values, their derivatives and batched forms
    high_rules          the rules of `high`: evaluation, types, derivatives, batching
    mapping             `jax.vmap` and scans over an axis of an implicit array
    derivatives         `jax.grad`, `vjp`, `jvp`, `linearize` and Jacobians
    custom_derivatives  the rules of `jax.custom_vjp` and `jax.custom_jvp`
    control_flow        loops and branches, which convert values to one form
    shard_map           `jax.shard_map` and collectives
    box_traces          the traces around a use of a `Box`
    box_contents        the contents of a `Box`, as values or as references
    box                 `Box`, a mutable container
    jit                 `vn.jit`: `jax.jit` for functions of implicit arrays and of Boxes
    patches             the list of all patches of JAX, and typed results of jitted functions
    custom_primitives   `vn.hijax.primitive`
"""

from . import high_rules as high_rules
from . import patches as patches
from .box import Box
from .custom_primitives import primitive
from .mode import enabled, install, is_enabled, uninstall

__all__ = ["Box", "enabled", "install", "is_enabled", "primitive", "uninstall"]


def __dir__() -> list[str]:
    return __all__
