"""Fixtures of the decoding tests; what they are made of is in peers.py."""

import pytest

from tests.generation.peers import CONFIGS, Peers, make_peers, make_prompts


@pytest.fixture(scope="session")
def random_prompts() -> list[list[int]]:
    """16 documents of 1 to 40 tokens."""
    return make_prompts()


@pytest.fixture(scope="session")
def all_peers(tmp_path_factory, random_prompts) -> dict[str, Peers]:
    """Peers by family."""
    return {name: make_peers(name, tmp_path_factory.mktemp(name), random_prompts) for name in CONFIGS}


@pytest.fixture(params=sorted(CONFIGS))
def peers(request, all_peers) -> Peers:
    """Peers of one family after the other."""
    return all_peers[request.param]
