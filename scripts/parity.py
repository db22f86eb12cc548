"""Print how far our logits are from transformers', one row per family; exit 1 where one is outside its bound.

Random tiny checkpoints written by transformers, read by our loader; left and right padding, whole forward and prefill
with decoding, positions to 255. Also checks that a damaged checkpoint is refused by name. No real weights here.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from alignment.errors import UserError
from alignment.models.checkpoint import load_language_model
from alignment.ragged import Ragged

BOUND = 1e-4  # largest |difference of logits|, fp32
LENGTHS = (256, 200, 31, 1)
GPT2 = {"vocab_size": 211, "n_positions": 256, "n_embd": 48, "n_layer": 3, "n_head": 4}
LLAMA = {
    "vocab_size": 211,
    "max_position_embeddings": 256,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "gpt2": {
        "plain": GPT2,
        "untied": {**GPT2, "tie_word_embeddings": False},
        "gelu": {**GPT2, "activation_function": "gelu", "n_inner": 80},
        "relu": {**GPT2, "activation_function": "relu"},
        "unscaled": {**GPT2, "scale_attn_weights": False},
        "scaled by layer": {**GPT2, "scale_attn_by_inverse_layer_idx": True},
    },
    "llama": {
        "plain": LLAMA,
        "tied": {**LLAMA, "tie_word_embeddings": True},
        "grouped queries": {**LLAMA, "num_key_value_heads": 2},
        "one key head": {**LLAMA, "num_key_value_heads": 1},
        "head_dim": {**LLAMA, "num_key_value_heads": 3, "head_dim": 20},
        "biases": {**LLAMA, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5},
        "rope linear": {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        "rope llama3": {**LLAMA, "num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE},
    },
}


def write_checkpoint(family: str, config: dict[str, Any], directory: Path, seed: int = 0) -> Any:
    """A random transformers model of `family`, saved by transformers; returns it in eval mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **ids, **config)).eval()
    with torch.no_grad():  # as drawn, logits are too near zero to show an error, and norms and biases are 1 and 0
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return model


def documents(vocabulary: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def padded(rows: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask [B, T], padding on `side`."""
    width = max(map(len, rows))
    ids = [([7] * (width - len(row)) + row) if side == "left" else row + [7] * (width - len(row)) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask if side == "left" else [row[::-1] for row in mask])


@torch.no_grad()
def padded_difference(reference: Any, model: Any, rows: list[list[int]], side: str) -> float:
    """Largest |difference of logits| at real tokens of one padded batch."""
    ids, mask = padded(rows, side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # transformers' GPT-2 does not derive them from the mask
    theirs = reference(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    return (model(ids, mask).logits - theirs)[mask.bool()].abs().max().item()


@torch.no_grad()
def decoding_difference(reference: Any, model: Any, rows: list[list[int]], steps: int = 40) -> float:
    """The same for prefill and `steps` decoded tokens, each row at its own place."""
    rows = [row for row in rows if len(row) > steps]
    theirs = [reference(input_ids=torch.tensor([row])).logits[0] for row in rows]
    begins = [len(row) - steps for row in rows]
    cache = model.new_cache(len(rows), max(map(len, rows)))
    ours = [model.prefill(Ragged.build([row[:-steps] for row in rows]), cache)]
    for step in range(steps):
        ours.append(model.decode(torch.tensor([row[b + step] for row, b in zip(rows, begins, strict=True)]), cache))
    expected = torch.stack([logits[b - 1 :] for logits, b in zip(theirs, begins, strict=True)], dim=1)
    return (torch.stack(ours) - expected).abs().max().item()


def case_differences(family: str, config: dict[str, Any], directory: Path) -> dict[str, float]:
    """Largest |difference of logits| for each way to run one checkpoint."""
    reference = write_checkpoint(family, config, directory)
    model = load_language_model(directory)
    rows = documents(config["vocab_size"])
    return {
        "left": padded_difference(reference, model, rows, "left"),
        "right": padded_difference(reference, model, rows, "right"),
        "cache": decoding_difference(reference, model, rows),
    }


def refusals(family: str, directory: Path) -> dict[str, bool]:
    """Whether each way to damage a checkpoint is refused with the damaged thing's name."""
    weights, config_path = directory / "model.safetensors", directory / "config.json"
    tensors, config = load_file(weights), json.loads(config_path.read_text())
    victim = sorted(tensors)[0]
    damaged = {
        "missing tensor": (victim, {k: v for k, v in tensors.items() if k != victim}, config),
        "extra tensor": ("model.surplus", {**tensors, "model.surplus": torch.zeros(1)}, config),
        "unknown key": ("attn_logit_softcapping", tensors, {**config, "attn_logit_softcapping": 30.0}),
    }
    results = {}
    for kind, (name, broken_tensors, broken_config) in damaged.items():
        save_file(broken_tensors, weights, metadata={"format": "pt"})
        config_path.write_text(json.dumps(broken_config))
        try:
            load_language_model(directory)
            results[kind] = False
        except UserError as error:
            results[kind] = name in str(error)
    return results


def check_family(family: str) -> bool:
    """Print the family's row; True where it holds."""
    worst: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, config in enumerate(CASES[family].values()):
            for way, value in case_differences(family, config, Path(folder, str(number))).items():
                worst[way] = max(worst.get(way, 0.0), value)
        refused = refusals(family, Path(folder, "0"))
    held = max(worst.values()) <= BOUND and all(refused.values())
    numbers = "  ".join(f"{way} {value:.1e}" for way, value in worst.items())
    print(
        f"{family:8} max |dlogit|  {numbers}  bound {BOUND:.0e}  cases {len(CASES[family])}  "
        f"refusals {sum(refused.values())}/{len(refused)}  {'ok' if held else 'OUTSIDE'}"
    )
    return held


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", nargs="+", choices=sorted(CASES), default=sorted(CASES), metavar="NAME")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    held = [check_family(family) for family in parser.parse_args().family]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
