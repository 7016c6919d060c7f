"""Each patch of JAX is needed: without it, the test that the table names fails."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import arrays

import veneer as vn
from veneer.hijax.mode import jax_patches

TESTS = Path(__file__).parents[1]

#: By file and by the name of each patch, the test that fails without the patch.
TESTS_BY_FILE = {
    "hijax/test_calls.py": {
        "operands.conversion": "test_a_function_can_be_compiled_ahead_of_time",
        "Primitive.bind_with_trace": "test_a_function_can_be_compiled_ahead_of_time",
        "closed_call.to_lojax": "test_a_scan_in_a_checkpoint_has_gradients",
        "remat2.to_lojax": "test_a_checkpoint_returns_a_typed_value",
    },
    "hijax/test_patches.py": {
        "lax.asarray": "test_lax_split_takes_an_implicit_array",
        "batching.broadcast": "test_vmap_of_gradients_of_a_branch_agrees",
        "loops.scan": "test_a_scan_slices_the_dense_array",
        "loops.map": "test_a_map_in_batches_slices_the_dense_array",
        "conditionals.cond": "test_a_cond_takes_an_implicit_predicate",
        "conditionals._check_branch_outputs": "test_branches_may_return_different_types",
    },
    "hijax/test_derivatives.py": {
        "api.argnums_partial2": "test_dense_tangent_decides_the_class_of_a_gradient",
        "api.vjp": "test_auxiliary_results_keep_their_class",
        "api.linearize": "test_linearize_agrees_with_jvp",
        "api._jvp": "test_jvp_of_a_weight_agrees",
        "custom_vjp.__call__": "test_a_dense_custom_vjp_takes_implicit_arrays",
    },
    "hijax/test_mapping.py": {
        "api.vmap": "test_jacobians_differentiate_each_leaf",
        "batching.is_vmappable": "test_vmap_along_any_axis_agrees[alone-LoraArray-eager]",
        "batching.to_elt": "test_vmap_along_any_axis_agrees[alone-LoraArray-eager]",
        "batching.from_elt": "test_vmap_of_results_that_cannot_be_stacked_raises",
        "batching.moveaxis": "test_vmap_of_a_scan_that_stacks_tangents_agrees[eager]",
        "conditionals._bcast_select": "test_vmap_of_branches_agrees[LoraArray-jitted branches]",
        "conditionals._bcast_select_n": "test_vmap_of_branches_agrees[LoraArray-within a loop]",
        "api.flatten_axes": "test_in_axes_accept_an_axis_for_each_leaf",
        "pmap._cached_shard_map": "test_pmap_of_a_value_without_a_batch_axis_raises",
        "loops.associative_scan": "test_an_associative_scan_agrees",
    },
    "hijax/test_rules.py": {
        "custom_jvp.__call__": "test_derivatives_are_no_arrays[sum-with_jvp-jvp]",
        "tree_util.tree_flatten": "test_derivatives_are_no_arrays[mapped by leaves-with_vjp-grad]",
        "ad_checkpoint.tracing_registry": "test_derivatives_are_no_arrays[checkpoint-with_jvp-jvp]",
        "pjit._infer_params": "test_a_cached_call_rejects_a_derivative",
    },
    "hijax/test_results.py": {
        "pjit._run_python_pjit": "test_compiled_functions_return_typed_results",
        "Traced.lojax": "test_compiled_functions_return_typed_results",
        "Traced.out_info": "test_abstract_results_have_the_shapes_of_leaves",
        "pjit.pjit_check_aval_sharding": "test_out_shardings_apply_to_the_leaves_of_a_result",
    },
    "hijax/test_loops.py": {
        "loops.while_loop": "test_two_types_in_a_carry_or_branches_agree",
        "conditionals._switch_internal": "test_branches_for_platforms_return_the_same_type",
    },
    "hijax/test_collectives.py": {
        "parallel.tree_util": "test_collectives_agree_with_dense_arrays[int8]",
    },
    "hijax/test_meshes.py": {
        "shard_map._shard_map": "test_shard_map_returns_a_typed_result",
        "shard_map.broadcast_prefix": "test_a_shard_map_made_before_the_mode_raises",
        "ShardMapPrimitive.bind_with_trace": "test_shard_map_returns_a_typed_result",
    },
    "hijax/test_frameworks.py": {
        "Scope.get_variable": "test_a_linen_parameter_can_be_quantized",
    },
    "frameworks/test_equinox.py": {
        "equinox.partition": "test_high_types_give_filter_grad_a_dense_gradient",
    },
}
NEEDED_BY = {
    patch: f"{file}::{test}"
    for file, tests in TESTS_BY_FILE.items()
    for patch, test in tests.items()
}
#: Patches that only some versions of JAX need.
OF_VERSIONS = {"pjit.pjit_check_aval_sharding", "closed_call.to_lojax"}

LOW_RANK = vn.types.LowRank(arrays.normal(4, 4), arrays.normal(4, 4, seed=1))
DENSE = arrays.array(np.asarray(LOW_RANK.a) @ np.asarray(LOW_RANK.b))


def test_the_table_lists_all_patches():
    assert set(NEEDED_BY) - OF_VERSIONS <= set(jax_patches.setters) <= set(NEEDED_BY)
    assert len(jax_patches.setters) <= 40


@pytest.mark.parametrize("test", sorted(set(NEEDED_BY.values())))
def test_the_named_tests_exist(test):
    file, name = test.split("::")
    assert f"\ndef {name.split('[')[0]}(" in (TESTS / file).read_text()


LEAVE_OUT = """
import sys
import pytest
import veneer.hijax
from veneer.hijax.mode import jax_patches
if sys.argv[1]:
    del jax_patches.setters[sys.argv[1]]
sys.exit(pytest.main(sys.argv[2:]))
"""


def run_without(patch, tests):
    """Run tests in a child process without a patch, or with all patches if it is empty."""
    options = ["-q", "-x", "--all", "-p", "no:cacheprovider"]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    return subprocess.run(
        [sys.executable, "-c", LEAVE_OUT, patch, *options, *(str(TESTS / test) for test in tests)],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("patch", NEEDED_BY)
def test_a_test_fails_without_the_patch(patch):
    if patch not in jax_patches.setters:
        pytest.skip("this version of JAX does not need it")
    run = run_without(patch, [NEEDED_BY[patch]])
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout + run.stderr


@pytest.mark.slow
def test_the_named_tests_pass_with_all_patches():
    run = run_without("", sorted({NEEDED_BY[patch] for patch in jax_patches.setters}))
    assert run.returncode == pytest.ExitCode.OK, run.stdout + run.stderr


# Programs that need a patch.


def test_lax_split_takes_an_implicit_array(agree):
    agree(lax.split(LOW_RANK, (1, 3)), lax.split(DENSE, (1, 3)))


def test_vmap_of_gradients_of_a_branch_agrees(agree_by_leaves):
    def gradient(see):
        loss = lambda is_used: lambda w: lax.cond(is_used, jnp.sum, lambda w: 1.0, see(w))
        return lambda is_used: jax.grad(loss(is_used))(LOW_RANK)

    is_used = jnp.array([True, False, True])
    found = jax.vmap(gradient(jnp.transpose))(is_used)
    agree_by_leaves(found, jax.vmap(gradient(vn.materialise))(is_used))


def test_a_scan_slices_the_dense_array(agree):
    agree(lax.scan(lambda c, row: (c + row, row[0]), jnp.zeros(4), LOW_RANK)[1], DENSE[:, 0])


def test_a_map_in_batches_slices_the_dense_array(agree):
    agree(lax.map(jnp.sum, LOW_RANK, batch_size=2), DENSE.sum(1))


def test_a_cond_takes_an_implicit_predicate(agree):
    is_positive = vn.types.Constant(jnp.array(True), ())
    agree(lax.cond(is_positive, lambda: 1.0, lambda: 2.0), jnp.array(1.0))


def test_branches_may_return_different_types(agree):
    branches = lambda p: lax.cond(p, lambda: jnp.transpose(LOW_RANK), lambda: DENSE)
    agree(jax.jit(branches)(True), DENSE.T)
    agree(jax.jit(branches)(False), DENSE)
