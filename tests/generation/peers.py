"""Peers for decoding: transformers' random models whose logits are far from flat, ours of the same weights, prompts."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from alignment import load_model

VOCABULARY = 211
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 128, "n_embd": 48, "n_layer": 2, "n_head": 4},
    "llama": {
        "max_position_embeddings": 128, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2,
    },
}  # fmt: skip


class Peers(NamedTuple):
    """One set of weights in two libraries.

    Attributes:
        stops: token that both models like to say, so that responses end at different lengths.
    """

    theirs: Any
    ours: Any
    stops: list[int]


def make_prompts() -> list[list[int]]:
    """16 documents of 1 to 40 tokens."""
    generator = torch.Generator().manual_seed(3)
    lengths = (5, 1, 17, 9, 9, 2, 30, 4, 12, 3, 40, 8, 6, 21, 7, 13)
    return [torch.randint(4, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def make_peers(family: str, directory: Path, prompts: list[list[int]]) -> Peers:
    """Write their model, read it with ours."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    ids = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **ids, **CONFIGS[family])).eval()
    perturb(theirs, 0.15)
    theirs.save_pretrained(directory)
    return Peers(theirs, load_model(str(directory)), [favourite(theirs, prompts)])


def perturb(model: Any, size: float) -> None:
    """As drawn, logits are nearly flat, and which token is likeliest hangs on rounding."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn_like(parameter)


def favourite(theirs: Any, prompts: list[list[int]]) -> int:
    """The token that most greedy responses have, but not as their first."""
    counts: Counter[int] = Counter()
    for prompt in prompts:
        counts.update(set(their_responses(theirs, prompt, [], max_new_tokens=24)[0][1:]))
    return counts.most_common(1)[0][0]


def their_responses(theirs: Any, prompt: list[int], stops: list[int], **settings: Any) -> list[list[int]]:
    """What transformers' `generate` finds without drawing, up to the first stop token; one or more responses."""
    settings = {"do_sample": False, "eos_token_id": stops or None, "pad_token_id": 3, **settings}
    config = copy.deepcopy(theirs.generation_config)
    config.update(**settings)
    with_mask = {"attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
    rows = theirs.generate(torch.tensor([prompt]), generation_config=config, **with_mask)
    written = 1 if theirs.config.is_encoder_decoder else len(prompt)
    return [up_to_stop(row[written:].tolist(), stops) for row in rows]


def up_to_stop(tokens: list[int], stops: list[int]) -> list[int]:
    """Without the padding after a stop token."""
    ends = [place for place, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens
