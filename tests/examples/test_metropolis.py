"""The sampler of the example, in short."""

import metropolis
import numpy as np


def test_the_chains_in_numba_and_python_agree(capsys):
    fast, slow = metropolis.main(steps=300, slow_steps=300, rounds=2)
    np.testing.assert_allclose(fast.mean, slow.mean, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(fast.deviation, slow.deviation, rtol=1e-2, atol=1e-3)
    assert 0.1 < fast.accepted == slow.accepted < 0.9
    assert "ratio of the medians of 2 rounds: " in capsys.readouterr().out
