"""Every stage with an adapter on an architecture without a table of ours, which runs as transformers' own class."""

import pytest
import torch
from torch.testing import assert_close

from alignment import load_model
from alignment.adapters import LoRASpec, attach, save_adapter
from alignment.reward_model import load_reward_network
from alignment.training import TrainingConfig

GPTJ = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 320, "rotary_dim": 4}
IDS = torch.arange(3, 30)[None]


@pytest.fixture(scope="module")
def gptj(tmp_path_factory, tokenizer):
    """Directory of a random GPT-J with the tests' tokenizer."""
    import transformers

    from alignment.data.tokenizers.tokenizer import save_tokenizer

    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model("gptj", vocab_size=len(tokenizer), **special, **GPTJ)
    directory = tmp_path_factory.mktemp("gptj")
    transformers.AutoModelForCausalLM.from_config(settings).save_pretrained(directory)
    save_tokenizer(tokenizer, directory)
    return str(directory)


@pytest.mark.filterwarnings("ignore")
def test_every_stage_trains_lora_and_peft_opens_its_files(gptj, make_stage, read_metrics, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    training = {"adapter": LoRASpec(rank=4, alpha=16.0), "training": TrainingConfig(batch_size=8, max_steps=6)}
    run, config = make_stage("sft", gptj, tmp_path / "sft", **training)
    policy = run(config)
    losses = [row["loss"] for row in read_metrics(tmp_path / "sft") if "loss" in row]
    assert losses[-1] < losses[0]
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(gptj), policy).eval()
    with torch.no_grad():
        assert_close(theirs(IDS).logits, load_model(str(policy))(IDS).logits, atol=1e-5, rtol=0)

    run, config = make_stage("reward", gptj, tmp_path / "reward", **training)
    judge = run(config)
    theirs = AutoModelForSequenceClassification.from_pretrained(gptj, num_labels=1)
    theirs.config.pad_token_id = 0
    theirs = PeftModel.from_pretrained(theirs, judge).eval()
    with torch.no_grad():
        assert_close(theirs(IDS).logits, load_reward_network(str(judge))(IDS).logits, atol=1e-5, rtol=0)

    run, config = make_stage("dpo", gptj, tmp_path / "dpo", **training)
    run(config)
    first = read_metrics(tmp_path / "dpo")[0]
    assert first["loss"] == pytest.approx(0.693147, abs=1e-6)

    training["training"] = TrainingConfig(batch_size=8, max_steps=1)
    run, config = make_stage("ppo", gptj, tmp_path / "ppo", reward_model=str(judge), value_model="policy", **training)
    assert load_model(str(run(config)))(IDS).logits.isfinite().all()


EXPERTS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 2, "vocab_size": 101, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "more"), [("llama4_text", {"head_dim": 8, "intermediate_size_mlp": 48}), ("phimoe", {})]
)
@pytest.mark.parametrize("layers", ["all-linear", r"(.*_proj|.*router)"])
def test_a_router_is_no_layer_of_lora(name, more, layers, tmp_path):
    import transformers
    from peft import PeftModel

    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(name, **EXPERTS, **more)
    transformers.AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path / "base")
    model = attach(load_model(str(tmp_path / "base")), LoRASpec(rank=4, layers=layers))
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    assert any("q_proj" in key for key in trained) and not any("router" in key for key in trained)
    model(IDS).logits.square().sum().backward()
    with torch.no_grad():
        for value in trained.values():
            assert value.grad is not None
            value += 0.1
    save_adapter(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        assert_close(theirs(IDS).logits, model.eval()(IDS).logits, atol=1e-5, rtol=0)
