"""Runs with the prompt of a pair computed once, and with it computed twice: the same weights, in fewer tokens."""

import pytest
import torch
from safetensors.torch import load_file

from alignment.data.batches import collate_pairs
from alignment.data.config import DataConfig
from alignment.models.shared_prompts import prompt_sharing
from alignment.ragged import Ragged
from alignment.training import OptimConfig, TrainingConfig
from tests.examples import pair_example

FEW_TOKENS = 500  # so that an update has several micro-batches, which hold other rows where prompts are shared


@pytest.fixture
def forwards(monkeypatch):
    """Tokens of each forward of a trunk."""
    from alignment.models.transformer import Transformer

    forward, counted = Transformer.forward, []

    def count(self, batch: Ragged, **options):
        counted.append((len(batch.tokens), batch.shared is not None))
        return forward(self, batch, **options)

    monkeypatch.setattr(Transformer, "forward", count)
    return counted


@pytest.mark.parametrize(
    ("kind", "family"), [("reward", ""), ("reward", "prefix"), ("dpo", ""), ("dpo", "lora"), ("dpo", "gpt2")]
)
def test_a_run_ends_in_the_same_weights(kind, family, stage, world, make_stage, tmp_path, read_metrics, forwards):
    start = stage(f"sft {family}".strip()) / "model"
    weights, lines, tokens = [], [], []
    for share in (False, True):
        forwards.clear()
        training = TrainingConfig(batch_size=8, max_steps=4, micro_batch_tokens=FEW_TOKENS, share_prompts=share)
        data = DataConfig(train=world["comparisons"], evaluation=world["comparisons"], max_rows=24)
        optim = OptimConfig(learning_rate=1e-3, eps=1e-4)  # Adam would make large steps of rounding errors
        output = tmp_path / str(share)
        run, config = make_stage(kind, str(start), output, data=data, training=training, optim=optim)
        [file] = (run(config)).glob("*model.safetensors")
        weights.append(load_file(file))
        lines.append(read_metrics(output))
        tokens.append(sum(count for count, _ in forwards))
        assert any(shared for _, shared in forwards) is share
    assert tokens[1] < 0.8 * tokens[0]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], atol=1e-6, rtol=0)
    for plain, shared in zip(*lines, strict=True):
        for name in ("loss", "margin", "held_out_loss"):
            assert shared.get(name) == pytest.approx(plain.get(name), abs=1e-5)


def test_a_finished_run_is_no_other_run_with_the_other_setting(stage, ran, tmp_path, read_metrics):
    for share in (True, False):
        training = TrainingConfig(batch_size=8, max_steps=1, share_prompts=share)
        ran("reward", str(stage("sft") / "model"), tmp_path, training=training)
    assert len(read_metrics(tmp_path)) == 1


def test_a_model_of_transformers_own_class_computes_prompts_apart_and_says_so(tmp_path):
    from transformers import StableLmConfig, StableLmForCausalLM

    from alignment.data.examples import Example
    from alignment.models.huggingface.checkpoint import load_language_model

    config = StableLmConfig(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=1)
    config.num_attention_heads = config.num_key_value_heads = 2
    StableLmForCausalLM(config).save_pretrained(tmp_path)
    model, notes = load_language_model(tmp_path), []
    share = prompt_sharing([model], wanted=True, note=notes.append)
    assert share is False and len(notes) == 1 and "stablelm is none" in notes[0]
    pair = pair_example(
        *(Example.single([1, 2, 3, n], [False] * 3 + [True], "a") for n in (4, 5)), margin=None, row_id="a"
    )
    [batch] = collate_pairs([pair], 100, share_prompts=share)
    assert model(batch=batch.ragged).log_probs.shape == (2,)
    [wrong] = collate_pairs([pair], 100, share_prompts=True)
    with pytest.raises(ValueError, match="takes no shared prompts"):
        model(batch=wrong.ragged)
