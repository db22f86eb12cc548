"""What every stage leaves behind: a model that plain transformers and peft open, and logs with the agreed keys."""

import json
import os

import pytest
import torch
from torch.testing import assert_close

from alignment import load_model, load_reward_model, load_tokenizer
from alignment.algorithms import reward, sft
from alignment.algorithms.dpo import dpo
from alignment.algorithms.rollouts import loop as ppo
from alignment.data.config import DataConfig
from alignment.reward_model import load_reward_network
from alignment.training import TrainingConfig
from tests.examples import padded

TIGHT = {"atol": 1e-5, "rtol": 0}
TEXT = "Hotel Old Oak. The spa is on floor seven.\nGuest Clara: Where is the spa?\nConcierge: On floor seven."

POLICIES = ["pretrain", "sft", "sft gpt2", "dpo", "ppo"]
POLICY_ADAPTERS = ["sft lora", "sft prefix", "dpo lora", "dpo prefix", "ppo lora", "sft lora gpt2"]
REWARD_MODELS = ["reward", "reward gpt2"]
REWARD_ADAPTERS = ["reward lora", "reward prefix", "reward lora gpt2"]


def model_of(stage, name):
    return str(stage(name) / "model")


def base_of(directory):
    with open(f"{directory}/adapter_config.json", encoding="utf-8") as file:
        return os.path.join(directory, json.load(file)["base_model_name_or_path"])


@pytest.mark.parametrize("name", [*POLICIES, *POLICY_ADAPTERS])
def test_a_policy_opens_in_transformers(name, stage):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = model_of(stage, name)
    adapter = name in POLICY_ADAPTERS
    theirs = AutoModelForCausalLM.from_pretrained(base_of(directory) if adapter else directory)
    theirs = (PeftModel.from_pretrained(theirs, directory) if adapter else theirs).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == TEXT
    assert ids.tolist() == load_tokenizer(directory)(TEXT, return_tensors="pt").input_ids.tolist()
    with torch.no_grad():
        assert_close(load_model(directory)(ids).logits, theirs(ids).logits, **TIGHT)


@pytest.mark.parametrize("name", [*REWARD_MODELS, *REWARD_ADAPTERS])
def test_a_reward_model_opens_in_transformers(name, stage):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    directory = model_of(stage, name)
    adapter = name in REWARD_ADAPTERS
    theirs = AutoModelForSequenceClassification.from_pretrained(
        base_of(directory) if adapter else directory, num_labels=1
    )
    theirs = (PeftModel.from_pretrained(theirs, directory) if adapter else theirs).eval()
    ours = load_reward_model(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    end = tokenizer.eos_token_id
    documents = [[*tokenizer(text).input_ids, end] for text in (TEXT, TEXT[:50], TEXT[10:])]
    ids, attention = padded(documents, filler=tokenizer.pad_token_id)
    with torch.no_grad():
        scores = theirs(ids, attention_mask=attention).logits
    assert scores.shape == (3, 1) and scores.std() > 1e-3
    assert_close(ours.score_ids(documents), scores[:, 0], **TIGHT)
    assert_close(ours.score([TEXT, TEXT[:50], TEXT[10:]]), scores[:, 0], **TIGHT)


KEYS = {
    "sft": {"loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second"},
    "reward": {"accuracy", "ties"},
    "dpo": {"chosen_reward", "rejected_reward", "accuracy"},
    "ppo": {
        "score", "kl", "approx_kl", "clip_fraction", "first_ratio_error", "value_loss", "policy_loss", "entropy", "kl_coef",
        "response_tokens", "ended_share", "seconds_rollout", "seconds_update",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KEYS)
def test_every_update_is_logged_with_the_agreed_keys(kind, stage, read_metrics):
    lines = read_metrics(stage(kind))
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    for line in lines:
        assert KEYS["sft"] | KEYS[kind] <= set(line)
        assert all(isinstance(value, int | float) for value in line.values())
    for name in ("config.yaml", "lineage.json"):
        assert (stage(kind) / name).is_file()


STAGES = {"sft": sft, "reward": reward, "dpo": dpo, "ppo": ppo}


@pytest.mark.parametrize("adapter", ["", "lora", "prefix"])
@pytest.mark.parametrize("kind", STAGES)
def test_what_is_saved_is_what_was_trained(kind, adapter, stage, ran, tmp_path, monkeypatch):
    """Also where the start is itself an adapter, and so are reward model and critic."""
    from alignment.adapters import LoRASpec

    name = "save_reward_model" if kind == "reward" else "save_policy"
    save, ids, trained = getattr(STAGES[kind], name), torch.arange(3, 40)[None], []

    def spied(engine, *rest, **named):
        with torch.no_grad():
            trained.append(engine.backend.unwrapped.eval()(ids).logits)
        return save(engine, *rest, **named)

    monkeypatch.setattr(STAGES[kind], name, spied)
    more = {"adapter": LoRASpec(rank=2)} if adapter == "lora" else {}
    more |= {"reward_model": model_of(stage, f"reward {adapter}".strip())} if kind == "ppo" else {}
    directory = ran(kind, model_of(stage, f"sft {adapter}".strip()), tmp_path, **more)
    assert directory == tmp_path / "model"
    model = (load_reward_network if kind == "reward" else load_model)(str(directory))
    with torch.no_grad():
        assert_close(model(ids).logits, trained[-1], **TIGHT)


@pytest.mark.parametrize("kind", ["pretrain", "sft", "reward", "dpo"])
def test_held_out_metrics_are_those_of_the_held_out_rows(kind, world, checkpoints, ran, tmp_path, read_metrics):
    """The same run beside other held-out rows learns the same, and says something else of them."""
    rows = {"pretrain": "pretrain", "sft": "demonstrations"}.get(kind, "comparisons")
    held_out = {"pretrain": "pretrain_heldout", "sft": "comparisons_heldout"}.get(kind, "comparisons_heldout")
    lines = []
    for name in (rows, held_out, rows):
        data = DataConfig(train=world[rows], evaluation=world[name], max_length=256)
        training = TrainingConfig(batch_size=8, max_steps=1)
        output = tmp_path / str(len(lines))
        ran(kind, checkpoints["llama"], output, data=data, training=training)
        lines += read_metrics(output)
    on_rows, on_held_out, again = ({k: v for k, v in line.items() if k.startswith("held_out_")} for line in lines)
    assert "held_out_loss" in on_rows and on_rows == again
    assert lines[0]["loss"] == lines[1]["loss"]
    assert abs(on_rows["held_out_loss"] - on_held_out["held_out_loss"]) > 1e-4
