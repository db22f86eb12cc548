"""New tokens in a vocabulary: their rows, ties, saved files, and training on (H21)."""

import pytest
import torch
from torch.testing import assert_close

from alignment.adapters import LoRASpec
from alignment.commands.export import export_model
from alignment.errors import UserError
from alignment.loading import load_model, load_tokenizer


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_h21_new_tokens_start_at_the_mean_and_config_weights_and_tokenizer_agree(family, checkpoints, tmp_path):
    from transformers import AutoModelForCausalLM

    source = checkpoints[family]
    output = str(export_model(source, None, str(tmp_path / "grown"), chat_template="chatml"))
    old, new, tokenizer = load_model(source), load_model(output), load_tokenizer(output)
    known = len(load_tokenizer(source))
    added = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>")]
    assert added == [known, known + 1] and max(added) < new.trunk.embed.num_embeddings == new.config["vocab_size"]
    assert (new.head.weight is new.trunk.embed.weight) == (old.head.weight is old.trunk.embed.weight)
    for before, after in ((old.trunk.embed, new.trunk.embed), (old.head, new.head)):
        assert_close(after.weight[:known], before.weight[:known], rtol=0, atol=0)
        assert_close(after.weight[added], before.weight[:known].mean(0).expand(2, -1), rtol=1e-6, atol=1e-7)
    ids = torch.tensor([[3, 4, added[0], 5, added[1]]])
    theirs = AutoModelForCausalLM.from_pretrained(output)(ids).logits
    assert_close(new(ids).logits, theirs, rtol=1e-4, atol=1e-5)
    assert_close(new(ids[:, :2]).logits[..., :known], old(ids[:, :2]).logits[..., :known], rtol=0, atol=1e-6)


@pytest.mark.parametrize("adapter", [None, LoRASpec(rank=4)], ids=["full", "LoRA"])
def test_h21_a_model_with_new_tokens_is_trained_saved_and_loaded(adapter, checkpoints, make_stage, tmp_path):
    from transformers import AutoModelForCausalLM

    source = str(export_model(checkpoints["gpt2"], None, str(tmp_path / "grown"), chat_template="chatml"))
    run, config = make_stage("sft", source, tmp_path / "run", chat_template="chatml", adapter=adapter)
    trained = str(run(config))
    ids = torch.tensor([[3, 4, len(load_tokenizer(trained)) - 1, 5]])
    logits = load_model(trained)(ids).logits
    assert_close(load_model(trained)(ids).logits, logits, rtol=0, atol=0)
    assert not torch.equal(load_model(source)(ids).logits, logits)
    if adapter is None:
        assert_close(AutoModelForCausalLM.from_pretrained(trained)(ids).logits, logits, rtol=1e-4, atol=1e-5)


def test_a_stage_refuses_a_template_whose_tokens_are_missing_before_it_loads_a_model(checkpoints, make_stage, tmp_path):
    run, config = make_stage("sft", checkpoints["gpt2"], tmp_path, chat_template="chatml")
    with pytest.raises(UserError, match=r"no special token <\|im_start\|>.*alignment export"):
        run(config)
