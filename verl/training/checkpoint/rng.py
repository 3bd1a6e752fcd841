"""The states of all random generators as plain tensors."""

import random

import numpy as np
import torch


def get_rng_state() -> dict[str, torch.Tensor]:
    """Python's, numpy's and torch's generators (CPU, and the current CUDA device) as tensors by name."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "cpu": torch.get_rng_state(),
        "numpy.keys": torch.from_numpy(keys.astype(np.int64)),
        "numpy.position": torch.tensor([position, has_gauss]),
        "numpy.cached": torch.tensor([cached], dtype=torch.float64),
        "random.words": torch.tensor([version, *words], dtype=torch.int64),
        # NaN: no second number of a Gaussian pair is waiting.
        "random.gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["device"] = torch.cuda.get_rng_state()
    return state


def load_rng_state(rng_state: dict[str, torch.Tensor]) -> None:
    """Sets what get_rng_state returned (tensors [n]); a CUDA state is ignored on a machine without CUDA."""
    torch.set_rng_state(rng_state["cpu"])
    position, has_gauss = rng_state["numpy.position"].tolist()
    keys = rng_state["numpy.keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, rng_state["numpy.cached"].item()))
    version, *words = rng_state["random.words"].tolist()
    gauss = rng_state["random.gauss"].item()
    random.setstate((version, tuple(words), None if gauss != gauss else gauss))
    if "device" in rng_state and torch.cuda.is_available():
        torch.cuda.set_rng_state(rng_state["device"])
