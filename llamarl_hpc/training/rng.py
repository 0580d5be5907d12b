"""Random states of one trainer rank, as tensors only, so that torch loads them as plain data."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor


def rng_state() -> dict[str, Tensor]:
    """States of torch (CPU and, if in use, this process's CUDA device), Python and numpy."""
    _, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict) and numpy_state["bit_generator"] == "MT19937"
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy_position": torch.tensor(
            [numpy_state["state"]["pos"], numpy_state["has_gauss"]], dtype=torch.int64
        ),
        "numpy_gauss": torch.tensor([numpy_state["gauss"]], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Tensor]) -> None:
    """Put back what `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = state["numpy_position"].tolist()
    key = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, float(state["numpy_gauss"])))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
