"""Decoding where each forward is a collective operation: every rank runs equally many, and no response changes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from alignment.generation import SamplingConfig, decode_responses
from alignment.models.build import build_language_model

LLAMA = {
    "model_type": "llama", "vocab_size": 61, "max_position_embeddings": 128, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True,
}  # fmt: skip
PROMPTS = [[[5, 6, 7], [8], [9, 10, 11, 12], [13], [14, 15]], [[16, 17, 18]]]  # 5 of the first rank, 1 of the second
STOPS = [range(20, 29), range(61)]  # the second rank's response ends at once


class Ranks:
    """Threads in the place of processes: each collective operation waits for all of them, 3 seconds at most."""

    def __init__(self, size: int):
        self.meeting, self.given = threading.Barrier(size, timeout=3), {}

    def largest(self, count: int) -> int:
        self.given[threading.get_ident()] = count
        self.meeting.wait()
        found = max(self.given.values())
        self.meeting.wait()
        return found


class CollectiveModel:
    """A model whose every forward waits for the other ranks', as one with sharded weights does."""

    def __init__(self, model, ranks):
        self.model, self.ranks, self.forwards = model, ranks, 0

    def __getattr__(self, name):
        return getattr(self.model, name)

    def prefill(self, *arguments):
        return self.forward(self.model.prefill, *arguments)

    def decode(self, *arguments):
        return self.forward(self.model.decode, *arguments)

    def forward(self, run, *arguments):
        self.forwards += 1
        self.ranks.meeting.wait()
        return run(*arguments)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build_language_model(dict(LLAMA)).eval()


def decode_on_ranks(model, max_new_tokens: int, *, agree: bool = True, stops=STOPS):
    """Responses and numbers of forwards by rank; `agree` is whether the ranks tell each other when they are done."""
    ranks = Ranks(len(PROMPTS))
    sampling = SamplingConfig(max_new_tokens, seed=3)
    models = [CollectiveModel(model, ranks) for _ in PROMPTS]

    def decode(rank: int):
        with torch.no_grad():
            return decode_responses(
                models[rank], PROMPTS[rank], sampling, stops[rank],
                rows=[10 * rank + i for i in range(len(PROMPTS[rank]))], batch_size=2,
                largest=ranks.largest if agree else None,
            )  # fmt: skip

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        futures = [pool.submit(decode, rank) for rank in range(len(PROMPTS))]
        return [future.result() for future in futures], [one.forwards for one in models]


@pytest.mark.parametrize("max_new_tokens", [1, 8, 30])
def test_ranks_with_unequal_rows_and_lengths_run_equally_many_forwards(model, max_new_tokens):
    """Three groups of prompts against one, and responses of up to 30 tokens against 1."""
    responses, forwards = decode_on_ranks(model, max_new_tokens)
    assert len(set(forwards)) == 1
    assert 3 <= forwards[0] <= 3 * max_new_tokens
    sampling = SamplingConfig(max_new_tokens, seed=3)
    for rank, found in enumerate(responses):
        rows = [10 * rank + i for i in range(len(PROMPTS[rank]))]
        assert found == decode_responses(model, PROMPTS[rank], sampling, STOPS[rank], rows=rows, batch_size=2)


@pytest.mark.parametrize("stop", [5, 26])
def test_rows_that_begin_at_different_times_end_at_their_limit(model, stop):
    """A row of the first rank ends early and another prompt takes it: its rows reach their limits at different steps."""
    stops = [[stop], []]
    responses, forwards = decode_on_ranks(model, 20, stops=stops)
    assert len(set(forwards)) == 1
    sampling = SamplingConfig(20, seed=3)
    lengths = []
    for rank, found in enumerate(responses):
        rows = [10 * rank + i for i in range(len(PROMPTS[rank]))]
        wanted = decode_responses(model, PROMPTS[rank], sampling, stops[rank], rows=rows, batch_size=2)
        assert found.token_ids == wanted.token_ids
        lengths += map(len, found.token_ids)
    assert min(lengths) < 12 and max(lengths) == 20


def test_ranks_stop_soon_after_their_last_row(model):
    """The second rank alone decodes one token, and the first one at most 30: it stops before where all rows have ended."""
    responses, forwards = decode_on_ranks(model, 100)
    longest = [max(map(len, response.token_ids)) for response in responses]
    assert longest[1] == 1 and longest[0] < 60
    assert forwards[0] <= 3 * (longest[0] + 8)


def test_without_dummy_steps_a_rank_would_wait_forever(model):
    with pytest.raises(threading.BrokenBarrierError):
        decode_on_ranks(model, 30, agree=False)
