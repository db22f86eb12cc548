"""The whole of RLHF on every family of decoders, and on one that only transformers knows: a step of each, and it opens again."""

import pytest
import torch

from alignment import generate, load_model, load_reward_model, load_tokenizer
from alignment.data.config import DataConfig
from alignment.data.tokenizers.tokenizer import save_tokenizer
from alignment.models.build import build_language_model
from alignment.models.huggingface.checkpoint import save_model
from alignment.training import OptimConfig, TrainingConfig
from tests.models.conftest import DECODERS as CASES

DECODERS = {name: {"model_type": case["model_type"], **case["config"]} for name, case in CASES.items()}
FOREIGN = {
    "model_type": "stablelm", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def directory(tmp_path, tokenizer):
    """`directory(family)` -> a tiny model of it with the world's tokenizer."""

    def write(family: str) -> str:
        special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
        folder = tmp_path / family
        if family == "foreign":
            from transformers import AutoConfig, AutoModelForCausalLM

            config = AutoConfig.for_model(**(FOREIGN | special), vocab_size=len(tokenizer))
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        else:
            folder.mkdir()
            save_model(build_language_model(DECODERS[family] | special | {"vocab_size": len(tokenizer)}), folder)
        save_tokenizer(tokenizer, folder)
        return str(folder)

    return write


@pytest.mark.parametrize("family", [*DECODERS, "foreign"])
def test_every_stage_takes_every_decoder(family, directory, make_stage, ran, world, tmp_path, read_metrics):
    one = {"training": TrainingConfig(batch_size=4, max_steps=1), "optim": OptimConfig(learning_rate=1e-3, eps=1e-5)}
    short = DataConfig(train=world["demonstrations"], max_rows=8, max_length=160)
    pairs = DataConfig(train=world["comparisons"], max_rows=8, max_length=160)
    prompts = DataConfig(train=world["prompts"], max_rows=8, max_length=160)
    run, config = make_stage("sft", directory(family), tmp_path / "sft", data=short, **one)
    policy = str(run(config))
    run, config = make_stage("reward", policy, tmp_path / "reward", data=pairs, **one)
    reward = str(run(config))
    ran("dpo", policy, tmp_path / "dpo", data=pairs, **one)
    assert read_metrics(tmp_path / "dpo")[0]["loss"] == pytest.approx(0.693147, abs=1e-4)
    run, config = make_stage(
        "ppo", policy, tmp_path / "ppo", reward_model=reward, data=prompts, max_new_tokens=4, epochs=1, minibatches=1,
        **one,
    )  # fmt: skip
    model, tokenizer = load_model(str(run(config))), load_tokenizer(policy)
    assert read_metrics(tmp_path / "ppo")[0]["first_ratio_error"] < 1e-5
    assert model.source == ("transformers" if family == "foreign" else "native")
    assert len(generate(model, tokenizer, ["Hello"], max_new_tokens=3).token_ids[0]) > 0
    assert load_reward_model(reward).score(["Hello", ("Hello", "there")]).isfinite().all()
