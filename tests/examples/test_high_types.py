"""Models of Flax and Equinox in four bits, trained by their own transformations."""

import high_types
import jax
import pytest

import veneer as vn


@pytest.mark.parametrize("framework", [high_types.make_flax_model, high_types.make_equinox_model])
def test_training_changes_adapters_and_not_codes(framework):
    model = framework()
    result = high_types.fine_tune(model, steps=25)
    assert result.losses[-1] < 0.6 * result.losses[0]
    assert high_types.nbytes(result.tuned) < 0.35 * high_types.nbytes(result.dense)
    start = high_types.add_qlora(model, result.dense)
    weights = [x for x in arrays_of(result.tuned) if isinstance(x, vn.types.LoraArray)]
    assert len(weights) == 2
    for weight, first in zip(weights, filter(is_lora, arrays_of(start)), strict=True):
        assert isinstance(weight.w, vn.quant.QArray)
        assert (weight.w.packed == first.w.packed).all()
        assert (weight.b != first.b).any()


def is_lora(x):
    return isinstance(x, vn.types.LoraArray)


def arrays_of(tree):
    return jax.tree.leaves(tree, is_leaf=is_lora)
