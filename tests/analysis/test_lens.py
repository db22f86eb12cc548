"""The logit lens: the last layer is the model, the others are transformers' states through its norm and head, and the page."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from alignment import cli, load_model, load_tokenizer
from alignment.adapters import PrefixSpec, PromptSpec, attach
from alignment.analysis import logit_lens
from alignment.analysis.lens import lens_logits
from alignment.errors import UserError
from alignment.models.build import build_model
from alignment.models.external.load import load_external
from alignment.models.huggingface.checkpoint import load_pretrained
from tests.analysis.test_inspection import TEXT, Page, tiny

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
from parity_reference import read_cases, write_checkpoint  # noqa: E402

NORMS = {
    "llama": "model.norm",
    "gpt2": "transformer.ln_f",
    "gemma2": "model.norm",
    "gpt_neox": "gpt_neox.final_layer_norm",
}
IDS = [7, 11, 5, 30, 9, 12]


@torch.no_grad()
@pytest.mark.parametrize("family", NORMS)
def test_every_layer_goes_through_norm_and_head_ours_and_foreign(family, tmp_path):
    """transformers' own norm and head on its states; Gemma 2 caps its logits: cap * tanh(logits / cap)."""
    reference = write_checkpoint(next(iter(read_cases(family).values())), tmp_path)
    states = reference(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    norm, head = reference.get_submodule(NORMS[family]), reference.get_output_embeddings()
    expected = [head(norm(state[0])) for state in states[:-1]] + [head(states[-1][0])]
    if cap := getattr(reference.config, "final_logit_softcapping", None):
        expected = [cap * torch.tanh(logits / cap) for logits in expected]
    for model in (load_pretrained(tmp_path), load_external(tmp_path)):
        found = list(lens_logits(model, IDS))
        assert len(found) == len(expected) > 2
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, atol=2e-5, rtol=1e-4)
        assert torch.equal(found[-1], model(torch.tensor([IDS])).logits[0])  # to the last bit


def test_logits_that_are_not_finite_have_no_most_probable_token(checkpoints):
    model = load_model(checkpoints["llama"])
    model.trunk.norm.weight.data.fill_(torch.nan)
    with pytest.raises(UserError, match="not finite"):
        logit_lens(model, IDS)


@torch.no_grad()
def test_masked_encoders_and_foreign_families_have_one_too(tmp_path):
    bert = build_model(
        {"model_type": "bert", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    )
    assert torch.equal(list(lens_logits(bert, IDS))[-1], bert(torch.tensor([IDS])).logits[0])
    from transformers import GPTJConfig, GPTJForCausalLM

    gptj = GPTJForCausalLM(
        GPTJConfig(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2, rotary_dim=4)
    ).eval()
    gptj.save_pretrained(tmp_path)
    model, states = load_model(str(tmp_path)), gptj(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    assert model.source == "transformers"
    for one, state in zip(lens_logits(model, IDS), states[:-1], strict=False):
        assert_close(one, gptj.lm_head(gptj.transformer.ln_f(state[0])))


@torch.no_grad()
@pytest.mark.parametrize("spec", [PromptSpec(tokens=3), PrefixSpec(tokens=3)])
def test_adapters_that_stand_in_front_act(spec, checkpoints):
    model, bare = attach(load_model(checkpoints["gpt2"]), spec), load_model(checkpoints["gpt2"])
    found = list(lens_logits(model, IDS))
    assert torch.equal(found[-1], model(torch.tensor([IDS])).logits[0]) and found[0].shape == found[-1].shape
    assert not torch.allclose(found[-1], bare(torch.tensor([IDS])).logits[0], atol=1e-3)


def test_tokens_and_kl_are_those_of_the_logits(checkpoints):
    model = load_model(checkpoints["llama"])
    lens, logits = logit_lens(model, IDS, top=3), list(lens_logits(model, IDS))
    assert lens.tokens.shape == lens.probabilities.shape == (3, len(IDS), 3) and lens.kl.shape == (3, len(IDS))
    own = logits[-1].softmax(-1)
    for number, layer in enumerate(logits):
        best = layer.softmax(-1).topk(3)
        assert torch.equal(lens.tokens[number], best.indices) and torch.allclose(
            lens.probabilities[number], best.values
        )
        kl = torch.distributions.kl_divergence(*(torch.distributions.Categorical(p) for p in (own, layer.softmax(-1))))
        assert_close(lens.kl[number], kl, atol=1e-5, rtol=1e-4)
    assert (lens.kl[-1] == 0).all() and (lens.kl[0] > 0).all()


def test_models_without_norm_or_head_are_refused_in_words(tokenizer, checkpoints, tmp_path):
    with pytest.raises(UserError, match="a language model of one side, no encoder-decoder"):
        next(lens_logits(load_model(tiny("t5", tokenizer, tmp_path / "t5")), IDS))
    with pytest.raises(UserError, match="no encoder-decoder, classifier or reward model"):
        next(lens_logits(build_model(load_model(checkpoints["gpt2"]).config, "scalar"), IDS))
    write_checkpoint(next(iter(read_cases("bert").values())), tmp_path)
    with pytest.raises(UserError, match="no norm between the last layer and the head is found"):
        next(lens_logits(load_external(tmp_path), IDS))


def test_the_command_writes_a_page_and_numbers(checkpoints, tmp_path, capsys):
    path = tmp_path / "lens.html"
    assert cli.main(["inspect", "lens", checkpoints["llama"], "--text", TEXT, "--top", "2", "--output", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    [found] = json.loads(path.with_suffix(".json").read_text())["texts"]
    ids = load_tokenizer(checkpoints["llama"])(TEXT)["input_ids"]
    lens = logit_lens(load_model(checkpoints["llama"]), ids, 2)
    assert len(found["tokens"]) == len(ids) and len(found["best"]) == 3 and len(found["best"][0][0]) == 2
    assert found["probabilities"][1][4] == pytest.approx(lens.probabilities[1, 4].tolist())
    assert found["kl"][1][4] == pytest.approx(lens.kl[1, 4].item())
    html = path.read_text()
    assert len(Page(html).named("td")) == 3 * len(ids) and "<script" not in html and "<b>ä" not in html
    [policy] = [attrs["content"] for attrs in Page(html).named("meta") if "http-equiv" in attrs]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert cli.main(["inspect", "lens", checkpoints["llama"], "--text", "word " * 300]) == 2
    assert "a page shows 128" in capsys.readouterr().err
