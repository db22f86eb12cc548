"""One update of every loss, objective, adapter, advantage, optimizer and precision, by the command; the lists are the library's.

A choice that is added to the library is a case here by itself. Tasks of `finetune` are in test_finetune.py.
"""

import json
import math
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from alignment import load_model
from alignment.cli import main
from alignment.config.schema import config_keys, packaged_schema, type_text
from alignment.data.tokenizers.tokenizer import save_tokenizer
from alignment.losses.preference_table import LOSSES
from alignment.models.build import build_model
from alignment.models.huggingface.checkpoint import save_model
from tests.conftest import write_lines

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
MODELS = {
    "llama": {"model_type": "llama", "max_position_embeddings": 160, **SMALL},
    "bert": {"model_type": "bert", "max_position_embeddings": 160, **SMALL},
    "t5": {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    "bart": {
        "model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 160,
    },
}  # fmt: skip
SETTINGS = {
    "optim.learning_rate": 0.01, "optim.schedule": "constant", "training.max_steps": 1,
    "training.batch_size": 4, "data.max_length": 96, "training.save_every_steps": 0,
}  # fmt: skip
STAGES = {  # stage -> the settings that its config needs
    "pretrain": {"data.train": "texts.jsonl"},
    "sft": {"policy": "llama", "data.train": "pairs.jsonl", "data.columns.response": "chosen"},
    "reward": {"policy": "llama", "data.train": "pairs.jsonl"},
    "dpo": {"policy": "llama", "data.train": "pairs.jsonl"},
    "ppo": {
        "policy": "llama", "reward_model": "judge", "data.train": "pairs.jsonl", "max_new_tokens": 4, "epochs": 1, "minibatches": 1,
        "responses_per_prompt": 2,
    },
}  # fmt: skip
# Keys whose values have a case each, by stage; a section that all stages share is in one of them.
KEYS = {
    "pretrain": ("objective", "objective.noises", "objective.task", "objective.masking.units", "tokenizer_kind"),
    "sft": (
        "loss_on", "adapter", "adapter.init", "adapter.placement", "adapter.activation", "optim.name", "optim.schedule",
        "optim.decay_type", "training.precision", "training.keep_activations", "weights.dtype", "weights.quantize",
    ),
    "reward": ("loss", "ensemble.kind"),
    "dpo": ("f_divergence", "offset_scale", "reference_log_probs"),
    "ppo": ("advantages", "kl_in", "kl_estimator", "ratio", "loss_normalization", "value_model"),
}  # fmt: skip
WORDPIECE = {"tokenizer_kind": "wordpiece", "vocabulary": 120}
ENCODER = {"model": MODELS["bert"], "objective.kind": "masked", **WORDPIECE}
T5 = {"model": MODELS["t5"], "tokenizer_kind": "bytes", "sentinels": 16}
BART = {"model": MODELS["bart"], "objective.kind": "infilling", **WORDPIECE}
LORA = {"adapter.kind": "lora", "adapter.rank": 2}
NEEDS = {  # (stage, key) or (stage, key, value) -> what goes with it
    ("pretrain", "objective", "causal"): {"policy": "llama"},
    ("pretrain", "objective", "masked"): ENCODER,
    ("pretrain", "objective", "sentence_pairs"): ENCODER | {"objective.kind": "sentence_pairs"},
    ("pretrain", "objective", "span_corruption"): T5,
    ("pretrain", "objective", "prefix"): T5,
    ("pretrain", "objective", "infilling"): BART,
    ("pretrain", "objective.noises"): BART,
    ("pretrain", "objective.task"): ENCODER | {"objective.kind": "sentence_pairs"},
    ("pretrain", "objective.masking.units"): ENCODER,
    ("pretrain", "tokenizer_kind"): {"model": MODELS["llama"], "vocabulary": 300},
    ("pretrain", "tokenizer_kind", "wordpiece"): ENCODER,
    ("pretrain", "tokenizer_kind", "bytes"): {"model": MODELS["llama"]},
    ("pretrain", "tokenizer_kind", "characters"): {"model": MODELS["llama"]},
    ("sft", "adapter.init"): LORA,
    ("sft", "adapter.placement"): {"adapter.kind": "bottleneck"},
    ("sft", "adapter.activation"): {"adapter.kind": "bottleneck"},
    ("sft", "optim.decay_type"): {"optim.schedule": "wsd"},
    ("sft", "training.keep_activations"): {"training.gradient_checkpointing": True},
    ("sft", "weights.dtype"): LORA,
    ("sft", "weights.quantize"): LORA,
    ("reward", "loss", "ranking"): {"data.train": "rankings.jsonl"},
    ("reward", "loss", "plackett_luce"): {"data.train": "rankings.jsonl"},
    ("reward", "loss", "rao_kupper"): {"data.train": "rankings.jsonl"},
    ("reward", "loss", "steps"): {"data.train": "steps.jsonl"},
    ("reward", "ensemble.kind", "heads"): {"ensemble.members": 2},
    ("reward", "ensemble.kind", "adapters"): LORA | {"ensemble.members": 2},
    ("dpo", "loss", "odpo+sigmoid"): {"loss": {"sigmoid": 0.8, "odpo": 0.2}},
    ("dpo", "offset_scale"): {"loss": "odpo"},
    ("ppo", "kl_in", "loss"): {"kl_estimator": "k3"},
    ("ppo", "ratio", "sequence"): {"advantages": "grpo"},
}
ROWS = {"labels": "labels.jsonl", "rankings": "rankings.jsonl", "comparisons": "pairs.jsonl"}
PLACES = {"tf32": "a GPU from Ampere on", "paged_adamw_8bit": "a GPU"}
PACKAGES = {"adamw_8bit": "bitsandbytes", "nf4": "bitsandbytes", "int8": "bitsandbytes"}


def choices(stage, key):
    """The values that a key of a stage's config can have, of its schema; of a section its kinds."""
    schema = packaged_schema(stage)
    types = {re.sub(r"\{.*?\}|\[\]", "", each.name): each.type for each in config_keys(schema)}
    types |= {name: type_text(value, schema["$defs"]) for name, value in schema["properties"].items()}
    return re.findall(r'(?:"|section of kind )([\w+-]+)', types[key])


CASES = [("dpo", "loss", name) for name in [*LOSSES, "odpo+sigmoid"]]
CASES += [(stage, key, value) for stage, keys in KEYS.items() for key in keys for value in choices(stage, key)]


def settings_of(stage, key, value):
    """The overrides of a case."""
    chosen = {"objective": "objective.kind", "adapter": "adapter.kind"}.get(key, key)
    given = SETTINGS | STAGES[stage] | {chosen: [value] if key == "objective.noises" else value}
    if (stage, key) == ("dpo", "loss") and value in LOSSES:
        given["data.train"] = ROWS[LOSSES[value].rows]
    more = NEEDS.get((stage, key, value), NEEDS.get((stage, key), {}))
    return [
        f"{name}={json.dumps(each) if isinstance(each, dict | list) else each}" for name, each in (given | more).items()
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A decoder, a reward model and four rows of each kind, by the names that the settings have."""
    folder = tmp_path_factory.mktemp("choices")
    special = {
        "vocab_size": len(tokenizer), "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    for name, task in (("llama", "language"), ("judge", "scalar")):
        torch.manual_seed(0)
        model = build_model(MODELS["llama"] | special, task)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        (folder / name).mkdir()
        save_model(model, folder / name)
        save_tokenizer(tokenizer, folder / name)
    prompts = [f"When does pool {number} open?" for number in range(4)]
    pairs = [
        {"prompt": prompt, "chosen": f" In May, at {number + 6}.", "rejected": " No." * (1 + number), "margin": 1.5}
        for number, prompt in enumerate(prompts)
    ]
    ranking = {"responses": [" No.", " In May.", " At noon."], "ranking": [1, 2, 0]}
    rows = {
        "texts": [{"text": f"The pool opens at {number}. It is warm. Guests like it." * 2} for number in range(4)],
        "pairs": pairs,
        "labels": [
            {"prompt": row["prompt"], "completion": row["chosen"], "label": number % 2 == 0}
            for number, row in enumerate(pairs)
        ],
        "rankings": [{"prompt": prompt, **ranking} for prompt in prompts],
        "steps": [
            {"prompt": prompt, "completions": [" Look.", " Noon."], "labels": [True, False]} for prompt in prompts
        ],
    }
    for name, lines in rows.items():
        write_lines(folder / f"{name}.jsonl", lines)
    return folder


def has_learned(start, output):
    """True where the result is not what the run began with."""
    if not (output / "model.safetensors").exists():  # an adapter
        ids = torch.tensor([[5, 6, 7]])
        return not torch.equal(load_model(str(output))(ids).logits, load_model(str(start))(ids).logits)
    ends, starts = load_file(output / "model.safetensors"), load_file(start / "model.safetensors")
    return any(name in starts and not torch.equal(value, starts[name]) for name, value in ends.items())


@pytest.mark.parametrize(
    ("stage", "key", "value"), CASES, ids=[f"{stage} {key}={value}" for stage, key, value in CASES]
)
def test_every_choice_takes_a_step(stage, key, value, folder, tmp_path, monkeypatch, read_metrics, capsys):
    if value in PLACES and not torch.cuda.is_available():
        pytest.skip(f"{value} needs {PLACES[value]}")
    if value in PACKAGES and find_spec(PACKAGES[value]) is None:
        pytest.skip(f"{value} needs {PACKAGES[value]}")
    for each in folder.iterdir():
        (tmp_path / each.name).symlink_to(each)
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("output: out\n", encoding="utf-8")
    settings = settings_of(stage, key, value)
    assert main([stage, "run.yaml", *settings]) == 0, capsys.readouterr().err
    (line,) = read_metrics(Path("out"))
    losses = [number for name, number in line.items() if name in ("loss", "policy_loss")]
    assert losses and all(map(math.isfinite, losses)) and line["grad_norm"] > 0
    fresh = any(each.startswith("model=") for each in settings)
    assert fresh or value == "adapters" or has_learned(folder / "llama", Path("out/model"))
