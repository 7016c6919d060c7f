"""Select the kernel for a product with a stored matrix.

The kernels are the rows of `common/table.py`, and the first row that fits is taken. XLA computes
all other products, and all products if the environment variable `VENEER_KERNELS` or `use` says
"xla". Kernels that were never measured are taken if one of these says "experimental".
"""

import dataclasses
import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import jax

from .common.problem import Codes, MatmulOperands, MatmulProblem, MatmulShape
from .common.table import LEAST_ENTRIES, PLATFORMS, TABLE, KernelRow, is_large_enough
from .cpu import build

Choice = Literal["auto", "xla", "experimental"]

# A user context and not a context variable: JAX traces a jitted function anew when it changes.
_choice = jax.make_user_context(None)


@contextmanager
def use(choice: str) -> Iterator[None]:
    """Set how products with stored matrices are computed, in programs that are traced within.

    **Arguments:**

    - `choice`: "auto", by the kernels of the platform where they are faster; "xla", by XLA alone;
      or "experimental", as "auto", and on a TPU by a kernel that was never measured. Outside of
      `use`, the environment variable `VENEER_KERNELS` sets it. The default is "auto".

    **Raises:** `ValueError` for another choice.

    >>> import jax.numpy as jnp, veneer as vn
    >>> from veneer import kernels
    >>> x, w = jnp.ones((2, 256)), vn.quant.quantize(jnp.eye(256), "int8", channelwise_axes=[1])
    >>> with kernels.use("xla"):
    ...     print(vn.explain(jnp.matmul)(x, w).events[0].how)
    convert codes of rhs to float, scale the output
    """
    if choice not in get_args(Choice):
        raise _unknown_choice(choice, "kernels.use")
    with _choice(choice):
        yield


def current_choice() -> Choice:
    """Return the choice of `use` or of the environment variable that applies now.

    **Raises:** `ValueError` if the environment variable `VENEER_KERNELS` has any other value.
    """
    choice: Any = _choice.value or os.environ.get("VENEER_KERNELS") or "auto"
    if choice not in get_args(Choice):
        raise _unknown_choice(choice, "VENEER_KERNELS")
    return choice


def _unknown_choice(choice: str, source: str) -> ValueError:
    renamed = ", which is now called 'experimental'" if choice == "pallas" else ""
    return ValueError(f"{source} must be 'auto', 'xla' or 'experimental', not {choice!r}{renamed}")


# Which kernel computes a product.


def can_have_kernel(entries: int, batch: Any) -> bool:
    """Return whether any kernel multiplies a batch of stored matrices with `entries` codes each.

    Return False if a number is symbolic, as when an embedding is exported with a symbolic number of
    rows.
    """
    smallest = min(LEAST_ENTRIES, key=LEAST_ENTRIES.__getitem__)
    return isinstance(entries, int) and is_large_enough(smallest, entries, batch)


def least_entries(platform: str, entries: int, batch: int) -> int | None:
    """Return how many codes a matrix needs for the kernels of a platform, if it has too few.

    The product has `batch` stored matrices with `entries` codes each. Return None if it is large
    enough, if `entries` is symbolic, or if the platform has no kernels that were measured.
    """
    has_kernels = any(row.platform == platform and not row.opt_in for row in TABLE)
    if not has_kernels or not isinstance(entries, int):
        return None
    return None if is_large_enough(platform, entries, batch) else LEAST_ENTRIES[platform]


def find_kernel(
    platform: str, codes: Codes, shape: MatmulShape, opt_in: bool = False
) -> KernelRow | None:
    """Return the row of the table for a product, or None if XLA computes it.

    **Arguments:**

    - `codes`, `shape`: the encoding of the stored matrix, and the sizes and types of the product.
    - `opt_in`: whether kernels that were never measured may compute the product.

    >>> from veneer.kernels import select
    >>> from veneer.kernels.common.problem import Codes, MatmulShape
    >>> shape = MatmulShape("rows", "float", m=1, k=4096, n=4096, tile=4096)
    >>> select.find_kernel("cpu", Codes(8, "int8"), shape).module
    'cpu.floats.rows_few'
    """
    for kernel in TABLE:
        if kernel.platform != platform or kernel.opt_in > opt_in:
            continue
        if not kernel.computes(codes, shape):
            continue
        if platform == "cpu":
            can_run = not kernel.requires_bf16 or build.has_bf16()
        else:
            module = device_kernel(kernel)
            can_run = module.is_available() and module.can_compute(codes, shape)
        if can_run:
            return kernel
    return None


def usable_kernels(operands: MatmulOperands, problem: MatmulProblem) -> dict[str, KernelRow]:
    """Return the kernels that compute a product in this process, by platform.

    XLA computes the product on all other platforms. The kernel of a GPU is compiled to test it, if
    a GPU is here. On other machines, no program runs it.
    """
    shape, kernels = problem.shape(operands), {}
    for platform in PLATFORMS:
        kernel = find_kernel(platform, problem.codes, shape, problem.opt_in)
        if kernel is None:
            continue
        if platform == "gpu":
            if not device_kernel(kernel).has_device():  # before any work
                continue
            arrays = jax.eval_shape(
                lambda xs: problem.with_float_scales(xs.deinterleaved())[1], operands
            )
            if not can_lower(kernel, arrays, dataclasses.replace(problem, tiles=None)):
                continue
        kernels[platform] = kernel
    return kernels


# Whether a kernel can run.


def is_built(target: str) -> bool:
    """Return whether a CPU kernel can be called in this process. Compile and register it if needed.

    `target` is the name of its FFI target. If it cannot be compiled, a warning says why, once.
    """
    reason = build.unavailable_reason()
    if reason is None:
        try:
            build.register_target(target)
            return True
        except Exception as error:  # Numba, LLVM and file systems raise errors of many types
            reason = f"compiling {target} failed: {error!r}"
    _warn("XLA, which is slower on CPU", reason)
    return False


@runtime_checkable
class DeviceKernel(Protocol):
    """The functions of a module that has a kernel for GPUs or TPUs."""

    def is_available(self) -> bool:
        """Return whether programs with the kernel can be traced in this process.

        The answer is no if JAX is too old, or if the GPUs of this process are of another kind.
        Without a GPU, programs for a GPU can still be traced.
        """
        ...

    def has_device(self) -> bool:
        """Return whether programs with the kernel can be lowered in this process.

        A kernel for GPUs is compiled for the GPUs of the process.
        """
        ...

    def can_compute(self, codes: Codes, shape: MatmulShape) -> bool:
        """Return whether the kernel computes a product, by its sizes and codes."""
        ...

    def compile(self, operands: MatmulOperands, problem: MatmulProblem) -> None:
        """Compile or lower the kernel for a product. Any error means that this is impossible."""
        ...

    def product(self, operands: MatmulOperands, problem: MatmulProblem) -> jax.Array:
        """Return the product of activations with `codes * scale`, in a program for one device.

        If `takes_zero_points` is true for the product, zero points are subtracted from the codes.
        The caller adds the terms of other zero points and of minima.
        """
        ...

    def takes_zero_points(self, operands: MatmulOperands, problem: MatmulProblem) -> bool:
        """Return whether `product` subtracts zero points from the codes."""
        ...


def device_kernel(kernel: KernelRow) -> DeviceKernel:
    """Import and return the module of a kernel for GPUs or TPUs."""
    module: Any = importlib.import_module(f"{__package__}.{kernel.module}")
    return module


def can_lower(kernel: KernelRow, operands: MatmulOperands, problem: MatmulProblem) -> bool:
    """Return whether a kernel for GPUs or TPUs can be compiled for a product in this process.

    If compilation fails, a warning gives the error, once. If this process has no GPU that the
    kernel is for, return False without a warning.
    """
    module = device_kernel(kernel)
    if not module.has_device():
        return False
    try:
        module.compile(operands, problem)
    except Exception as error:  # NVRTC and Pallas raise errors of many types
        summary = str(error).strip().partition("\n")[0]
        _warn("XLA", f"no kernel for {kernel.platform.upper()}: {type(error).__name__}: {summary}")
        return False
    return True


@cache
def _warn(to: str, reason: str) -> None:
    warnings.warn(
        f"products with quantized weights are computed by {to}: {reason}. "
        "Set VENEER_KERNELS=xla to use XLA without this warning",
        stacklevel=2,
    )
