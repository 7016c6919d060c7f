"""Solves, inverses and determinants of `w + scale * a @ b`, by those of `w`.

The Woodbury identity and the matrix determinant lemma (Golub and Van Loan, *Matrix Computations*,
section 2.1.4): all that is factorised is the capacitance `C = I + scale · b w⁻¹ a`, of the size of
the rank. Digits are lost where `w` or C is much nearer to a singular matrix than the sum is.
"""

from typing import Any

import jax.numpy as jnp

from ..structured.matrix import Matrix, overrides


def can(lora: Any, method: str) -> bool:
    """Whether `w` has a way of its own to do what the identity needs."""
    w = lora.w
    needed = {method, "solve"}
    return lora.is_sum and isinstance(w, Matrix) and all(overrides(w, name) for name in needed)


def solve(lora: Any, b: Any) -> Any:
    """`x - s w⁻¹a C⁻¹ b x` of `x = w⁻¹ v`, for each vector v of b."""
    x, found = lora.w.solve(b), _capacitance(lora)
    if x is NotImplemented or found is NotImplemented:
        return NotImplemented
    capacitance, of_a = found
    low = jnp.linalg.solve(capacitance, lora.b @ jnp.matrix_transpose(x))
    return x - lora.scale * jnp.matrix_transpose(low) @ of_a


def inverse(lora: Any) -> Any:
    """`w⁻¹ - s w⁻¹a C⁻¹ b w⁻¹`, which is an update of `w⁻¹`: (w⁻¹, w⁻¹a, C⁻¹ b w⁻¹)."""
    transposed, found = lora.w.transposed(), _capacitance(lora)
    parts = lora.w.inverse(), found, transposed
    if any(part is NotImplemented for part in parts):
        return NotImplemented
    of_b = transposed.solve(jnp.asarray(lora.b))
    if of_b is NotImplemented:
        return NotImplemented
    capacitance, of_a = found
    return parts[0], jnp.matrix_transpose(of_a), jnp.linalg.solve(capacitance, of_b)


def slogdet(lora: Any) -> Any:
    """`det w · det C`."""
    of_w, found = lora.w.slogdet(), _capacitance(lora)
    if of_w is NotImplemented or found is NotImplemented:
        return NotImplemented
    sign, logabsdet = jnp.linalg.slogdet(found[0])
    return of_w[0] * sign, of_w[1] + logabsdet


def _capacitance(lora: Any) -> Any:
    """C, and `w⁻¹ a` with its columns as vectors."""
    of_a = lora.w.solve(jnp.matrix_transpose(lora.a))
    if of_a is NotImplemented:
        return NotImplemented
    low = lora.scale * lora.b @ jnp.matrix_transpose(of_a)
    return jnp.eye(low.shape[-1], dtype=low.dtype) + low, of_a
