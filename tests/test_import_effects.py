"""Importing every module of veneer changes nothing that other users of the process observe.

A child process runs this file. It imports JAX, NumPy, Numba and all other libraries that veneer
imports, records the state of the process and of these libraries, imports every module of veneer,
and records the state again.
"""

import importlib
import json
import locale
import logging
import os
import pkgutil
import random
import re
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numba
import numba.core.datamodel
import numpy as np
import pytest
from jax import lax
from jax._src import api, core, dispatch, linear_util, pjit, tree_util
from jax._src.interpreters import ad, batching, mlir, partial_eval
from numba.core import registry
from numba.core.target_extension import dispatcher_registry
from support import optional


def mlp_loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return (x**2).sum()


@jax.custom_vjp
def clipped_sin(x):
    return jnp.sin(x)


clipped_sin.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g * jnp.cos(x), -1, 1),))


def take_rows(x):
    add_row = lambda i, s: s + lax.dynamic_slice(x, (i, 0), (1, 4))
    return lax.fori_loop(0, 4, add_row, x[:1])


def scan_checkpointed(x):
    return lax.scan(jax.checkpoint(lambda c, r: (c @ x, r)), x, x)[0].sum()


PROGRAMS = {
    "matmul": lambda x: x @ x,
    "scan": lambda x: lax.scan(lambda c, r: (jnp.tanh(c @ x + r), c.sum()), x[0], x),
    "while_loop": lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 2, x),
    "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "grad of an MLP": lambda x: jax.grad(mlp_loss)([x, x], x),
    "vmap": jax.vmap(lambda x: jnp.outer(x, x)),
    "custom_vjp": jax.grad(lambda x: clipped_sin(x).sum()),
    "sort and cumsum": lambda x: jnp.cumsum(jnp.sort(x, axis=0), axis=1),
    "convolution": lambda x: lax.conv(x[None, None], jnp.ones((1, 1, 3, 3)), (1, 1), "SAME"),
    "fori_loop": take_rows,
    "random numbers": lambda x: jax.random.normal(jax.random.key(0), x.shape) + x,
    "grad of a checkpointed scan": jax.grad(scan_checkpointed),
}


def lower_programs():
    jax.clear_caches()
    return {name: jax.jit(f).lower(jnp.ones((4, 4))).as_text() for name, f in PROGRAMS.items()}


def identity(x):
    return f"{getattr(x, '__module__', '')} {getattr(x, '__qualname__', '')} {id(x)}"


def lowering_rules():
    tables = {"any": mlir._lowerings, **mlir._platform_specific_lowerings}
    return {
        f"{primitive} lowered for {platform} platform": identity(getattr(entry, "rule", entry))
        for platform, table in tables.items()
        for primitive, entry in table.items()
    }


def transformation_rules():
    tables = {
        "jvp": ad.primitive_jvps,
        "transpose": ad.primitive_transposes,
        "batching": batching.fancy_primitive_batchers,
        "partial evaluation": partial_eval.custom_partial_eval_rules,
        "dead code": partial_eval.dce_rules,
    }
    return {
        f"{primitive} in {name}": identity(rule)
        for name, table in tables.items()
        for primitive, rule in table.items()
    }


def attributes_of_libraries():
    """Return the functions, classes and methods that a patch would replace."""
    owners = [jax, jnp, lax, np, numba, core, api, dispatch, pjit, tree_util, linear_util]
    owners += [ad, batching, mlir, partial_eval, core.Primitive, core.Trace, core.Tracer]
    owners += [jax.Array, type(jnp.ones(1))]
    return {
        f"{owner.__name__}.{name}": identity(value)
        for owner in owners
        for name, value in vars(owner).items()
        if callable(value)
    }


def numba_registries():
    codegen = registry.cpu_target.target_context.codegen()
    models = numba.core.datamodel.default_manager._handlers
    return {
        "library class": identity(codegen._library_class),
        **{f"{kind.__qualname__} in models": identity(model) for kind, model in models.items()},
        **{f"{x} in dispatchers": identity(kind) for x, kind in dispatcher_registry.items()},
    }


def thread_affinity():
    if not hasattr(os, "sched_getaffinity"):
        return None
    threads = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    return sorted({str(os.sched_getaffinity(thread)) for thread in threads})


def hooks():
    of_sys = (
        "excepthook unraisablehook displayhook breakpointhook meta_path path_hooks path".split()
    )
    values = [getattr(sys, name) for name in of_sys]
    return [*map(str, values), str(threading.excepthook), str(sys.gettrace())]


def current_umask():
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


def interpreter():
    settings = [sys.getrecursionlimit(), sys.getswitchinterval(), os.getcwd(), current_umask()]
    return [*settings, sorted(thread.name for thread in threading.enumerate())]


def logging_state():
    root = logging.getLogger()
    return [root.level, str(root.handlers), str(root.filters), logging.getLogger("jax").level]


#: Tables that an import may extend, for example with rules for primitives of veneer.
TABLES = {
    "lowering rules": lowering_rules,
    "transformation rules": transformation_rules,
    "attributes of libraries": attributes_of_libraries,
    "Numba registries": numba_registries,
}
SETTINGS = {
    "CPU affinity": thread_affinity,
    "warning filters": lambda: [str(warnings.filters), str(warnings.showwarning)],
    "NumPy errors": lambda: [np.geterr(), str(np.geterrcall())],
    "NumPy print options": lambda: str(np.get_printoptions()),
    "random states": lambda: [str(np.random.get_state()), str(random.getstate())],
    "Numba settings": lambda: {k: str(v) for k, v in vars(numba.config).items() if k.isupper()},
    "JAX settings": lambda: {name: str(value) for name, value in jax.config.values.items()},
    "environment": lambda: dict(os.environ),
    "signal handlers": lambda: [str(signal.getsignal(x)) for x in sorted(signal.valid_signals())],
    "hooks": hooks,
    "interpreter": interpreter,
    "locale": lambda: [locale.setlocale(locale.LC_ALL), str(locale.getlocale())],
    "logging": logging_state,
}


def record():
    # Programs come first, because JAX itself registers rules when it first lowers a program.
    observables = {"programs": lower_programs, **TABLES, **SETTINGS}
    return {name: observe() for name, observe in observables.items()}


def import_modules(names):
    """Import modules. Return the errors of those that need a library that is not installed."""
    errors = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            errors.append(str(error))
    return errors


def names_of_modules():
    # This imports the packages, but not the modules in them.
    package = importlib.import_module("veneer")
    return [module.name for module in pkgutil.walk_packages(package.__path__, "veneer.")]


def run_child(*arguments, environment):
    command = [sys.executable, __file__, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    environment["VENEER_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    names, libraries = run_child(environment=environment)
    return run_child(json.dumps(names), json.dumps(libraries), environment=environment)


def test_all_modules_are_imported(records):
    assert "veneer.kernels.stacks" in records["names"]
    assert len(records["names"]) > 200
    libraries = "|".join(optional.missing_libraries())
    assert all(
        re.search(rf"pip install|No module named '({libraries})", x) for x in records["errors"]
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_importing_veneer_changes_no_setting(records, name):
    assert records["after"][name] == records["before"][name]


@pytest.mark.parametrize("name", TABLES)
def test_importing_veneer_changes_no_entry_of_a_table(records, name):
    before, after = records["before"][name], records["after"][name]
    assert len(before) >= 10
    # An entry may be added for a primitive of veneer, but not for one of JAX.
    subjects = {key.split()[0] for key in before}
    assert {key: x for key, x in after.items() if key.split()[0] in subjects} == before


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_without_our_arrays_lower_to_the_same_text(records, name):
    before, after = (records[when]["programs"][name] for when in ("before", "after"))
    assert "stablehlo" in before
    assert after == before


def main():
    if len(sys.argv) == 1:
        own = {*sys.modules}
        names = names_of_modules()
        import_modules(names)
        libraries = [x for x in sys.modules if x not in own and x.split(".")[0] != "veneer"]
        print(json.dumps([names, libraries]))
        return
    names, libraries = map(json.loads, sys.argv[1:])
    import_modules(libraries)
    lower_programs()
    numba.njit(lambda x: x + 1)(1)
    jax.jit(lambda x: x + 1)(1).block_until_ready()
    before = record()
    errors = import_modules(names)
    print(json.dumps({"before": before, "after": record(), "names": names, "errors": errors}))


if __name__ == "__main__":
    main()
