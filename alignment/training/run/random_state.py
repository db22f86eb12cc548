"""The global random states of one process as plain JSON values. Local generators are not included."""

import base64
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """States of the global generators of Python, NumPy and torch, on the CPU and on all devices."""
    kind, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": [kind, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(state) for state in cuda],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` returned; devices that no longer exist are left out."""
    kind, words, gauss = state["python"]
    random.setstate((kind, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(state["torch"]))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, saved in enumerate(state["cuda"][:devices]):
        torch.cuda.set_rng_state(_decode(saved), device)


def generator_states() -> list[str]:
    """States of torch's global generators on the CPU and all devices, which are the ones that models use."""
    state = random_state()
    return [state["torch"], *state["cuda"]]


def rank_seed(seed: int, rank: int) -> int:
    """A seed for one rank's global generator, independent of other ranks and other seeds."""
    return int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0])


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """While open, random numbers may be used; afterwards the global random states are as before."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.cpu().numpy())).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
