"""Generator states as tensors: set again, the same numbers come."""

import random

import numpy as np
import torch

from verl.training.checkpoint.rng import get_rng_state, load_rng_state


def draw():
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]


def test_a_state_set_again_gives_the_same_numbers():
    random.gauss(0, 1), np.random.randn()  # leaves half of a pair waiting in both
    state = get_rng_state()
    first = [draw(), draw()]
    assert all(isinstance(v, torch.Tensor) for v in state.values())
    load_rng_state(state)
    assert [draw(), draw()] == first
