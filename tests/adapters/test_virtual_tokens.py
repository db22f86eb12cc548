"""Soft prompts and prefixes: the same logits as peft's from the same files, in every architecture, and in decoding."""

import pytest
import torch
from peft import PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from alignment.adapters import PrefixSpec, PromptSpec, attach, disabled, load_adapter, merge_adapter, save_adapter
from alignment.errors import UserError
from alignment.generation import SamplingConfig, decode_responses
from alignment.models.external.load import load_external
from alignment.models.external.rectangles import RereadCache, SharedCache
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.ragged import Ragged, with_virtual_tokens
from tests.adapters.tiny_models import CAUSAL, ISSUE, MODELS, SEQ2SEQ, TIGHT, disturb, inputs, write
from tests.examples import padded

P = 3
SPECS = {"prompt": PromptSpec(tokens=P), "prefix": PrefixSpec(tokens=P)}
KIND = pytest.mark.parametrize("kind", SPECS)
CONFIGS = {"prompt": PromptTuningConfig, "prefix": PrefixTuningConfig}


@torch.no_grad()
def logits(model, name):
    return model.eval()(**inputs(name)).logits


def peft_logits(model, name, kind):
    """Logits at the document's own tokens; peft returns those of a decoder's or encoder's soft prompt too."""
    found = logits(model, name)
    return found[:, P:] if kind == "prompt" and MODELS[name][0] != SEQ2SEQ else found


@KIND
@pytest.mark.parametrize("name", [*ISSUE, "pegasus"])
def test_logits_equal_those_of_peft_from_our_file_and_from_its_own(name, kind, tmp_path):
    theirs = write(name, tmp_path / "base")
    plain = logits(theirs, name)
    ours = disturb(attach(load_pretrained(tmp_path / "base"), SPECS[kind]))
    wanted = logits(ours, name)
    assert (wanted - plain).abs().max() > 0.05  # the adapter does something
    with disabled(ours):
        assert_close(logits(ours, name), plain, **TIGHT)

    save_adapter(ours, tmp_path / "ours", base=str(tmp_path / "base"))
    opened = PeftModel.from_pretrained(theirs, tmp_path / "ours")
    assert_close(peft_logits(opened, name, kind), wanted, **TIGHT)
    again = load_adapter(load_pretrained(tmp_path / "base"), tmp_path / "ours")
    assert torch.equal(logits(again, name), wanted)

    task = {CAUSAL: "CAUSAL_LM", SEQ2SEQ: "SEQ_2_SEQ_LM"}.get(MODELS[name][0], "FEATURE_EXTRACTION")
    made = get_peft_model(write(name, tmp_path / "base"), CONFIGS[kind](task_type=task, num_virtual_tokens=P))
    disturb(made).save_pretrained(tmp_path / "theirs")
    read = load_adapter(load_pretrained(tmp_path / "base"), tmp_path / "theirs")
    assert_close(logits(read, name), peft_logits(made, name, kind), **TIGHT)


@KIND
@pytest.mark.parametrize("name", ["llama", "stablelm"])
def test_a_reward_models_adapter_opens_in_peft_with_its_head(name, kind, tmp_path):
    from transformers import AutoModelForSequenceClassification

    write(name, tmp_path / "base")
    ours = disturb(attach(load_pretrained(tmp_path / "base", "scalar", new_head=True), SPECS[kind]))
    save_adapter(ours, tmp_path / "ours", base=str(tmp_path / "base"))
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    found = logits(PeftModel.from_pretrained(theirs, tmp_path / "ours"), name)
    assert_close(logits(ours, name), found, **TIGHT)


def test_a_document_gets_its_virtual_tokens_in_front():
    batch, own, _ = with_virtual_tokens(Ragged.build([[7, 8, 9], [5]], [[False, True, True], [False]]), 2)
    assert batch.tokens.tolist() == [0, 0, 7, 8, 9, 0, 0, 5]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert (batch.starts.tolist(), batch.lengths) == ([0, 5, 8], (5, 3))
    assert (own.tolist(), batch.target_index.tolist(), batch.target_rows.tolist()) == ([2, 3, 4, 7], [3, 4], [0, 0])


DOCUMENTS = [[5, 9, 44, 3, 8, 61, 99, 7, 31, 15, 16, 23], [88, 4], [17, 3, 90, 21]]


@torch.no_grad()
@KIND
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "bert", "stablelm"])
def test_a_document_is_the_same_alone_in_company_and_wherever_padding_lies(name, kind, tmp_path):
    write(name, tmp_path)
    model = disturb(attach(load_pretrained(tmp_path), SPECS[kind])).eval()
    masks = [[True] * len(document) for document in DOCUMENTS] if name == "bert" else None
    together = model(batch=Ragged.build(DOCUMENTS, masks)).log_probs
    alone = [Ragged.build([row], None if masks is None else [masks[i]]) for i, row in enumerate(DOCUMENTS)]
    assert_close(together, torch.cat([model(batch=batch).log_probs for batch in alone]), **TIGHT)
    for side in ("left", "right"):
        ids, mask = padded(DOCUMENTS, side, filler=77)
        single = torch.cat([model(torch.tensor([document])).logits[0] for document in DOCUMENTS])
        assert_close(model(ids, mask).logits[mask], single, **TIGHT)


@KIND
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "t5", "stablelm", "starcoder2", "mpt", "pegasus"])
def test_decoding_equals_the_whole_forward(name, kind, tmp_path, monkeypatch):
    """In transformers' classes as well: with a shared cache, and where every step reads the documents again."""
    more = {
        "starcoder2": (CAUSAL, MODELS["llama"][1] | {"sliding_window": 6}),
        "mpt": (CAUSAL, {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    }
    monkeypatch.setitem(MODELS, name, MODELS[name] if name in MODELS else more[name])
    write(name, tmp_path)
    model = disturb(attach(load_pretrained(tmp_path), SPECS[kind])).eval()
    seq2seq = MODELS[name][0] == SEQ2SEQ
    if name in more:
        reread = name == "mpt" or kind == "prefix"
        assert type(model.new_cache(1, 8)) is (RereadCache if reread else SharedCache)
    settings = SamplingConfig(max_new_tokens=9)
    drawn = decode_responses(model, DOCUMENTS, settings, stop_ids=[13], start_token=0 if seq2seq else None)
    for prompt, response, log_probs in zip(DOCUMENTS, drawn.token_ids, drawn.log_probs, strict=True):
        whole = [0, *response] if seq2seq else [*prompt, *response]
        with torch.no_grad():
            if seq2seq:
                scores = model(torch.tensor([prompt]), decoder_input_ids=torch.tensor([whole])).logits[0, :-1]
            else:
                scores = model(torch.tensor([whole])).logits[0, len(prompt) - 1 : -1]
        expected = scores.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1)
        assert_close(torch.tensor(log_probs), expected, atol=2e-5, rtol=0)


@KIND
def test_virtual_tokens_take_positions(kind, tmp_path):
    """64 positions hold 61 tokens behind 3."""
    write("llama", tmp_path)
    model = attach(load_pretrained(tmp_path), SPECS[kind])
    model(torch.ones(1, 61, dtype=torch.long))
    with pytest.raises(UserError, match=r"62 tokens after a (soft prompt|prefix) of 3"):
        model(torch.ones(1, 62, dtype=torch.long))
    with pytest.raises(UserError, match="65 tokens"):
        model.new_cache(1, 62)


@pytest.mark.parametrize("name", ["gemma3_text", "stablelm", "t5"])
def test_where_a_soft_prompt_starts(name, tmp_path):
    write(name, tmp_path)
    base = load_pretrained(tmp_path)
    table = base.inner.get_input_embeddings() if name == "stablelm" else None
    if table is None:
        stack = base.encoder if name == "t5" else base.trunk
        table = stack.token_vectors
    every_row = table(torch.arange(101)).detach()

    def tokenizer(text):
        return {"input_ids": [int(word) for word in text.split()]}

    text = attach(load_pretrained(tmp_path), PromptSpec(tokens=4, init_text="7 50 9"), tokenizer=tokenizer)
    assert torch.equal(text.soft_prompt(), every_row[[7, 50, 9, 7]])
    with pytest.raises(UserError, match="needs the model's tokenizer"):
        attach(base, PromptSpec(init_text="7"))
    if name != "stablelm":
        sizes = attach(base.to("meta"), PromptSpec(tokens=4, init_text="7"))  # as a plan does
        assert sizes.soft_prompt.embedding.weight.shape == (4, 32)


def test_what_does_not_fit_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "mamba", (CAUSAL, {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}))
    write("mamba", tmp_path / "mamba")
    with pytest.raises(UserError, match="MambaForCausalLM does not keep them"):
        attach(load_external(tmp_path / "mamba"), PrefixSpec())
    monkeypatch.setitem(MODELS, "albert", ("AutoModelForMaskedLM", {**MODELS["bert"][1], "embedding_size": 16}))
    write("albert", tmp_path / "albert")
    with pytest.raises(UserError, match="'albert' ignores a prefix"):
        attach(load_pretrained(tmp_path / "albert"), PrefixSpec())
    write("llama", tmp_path / "llama")
    ours = attach(load_pretrained(tmp_path / "llama"), PromptSpec(tokens=2))
    save_adapter(ours, tmp_path / "a", base=str(tmp_path / "llama"))
    with pytest.raises(UserError, match="no change of weights"):
        merge_adapter(ours)
    file = tmp_path / "a" / "adapter_model.safetensors"
    save_file({"prompt_embeddings": load_file(file)["prompt_embeddings"][:, :-1].contiguous()}, file)
    with pytest.raises(UserError, match=r"soft_prompt.embedding.weight has shape \[2, 31\], the model wants \[2, 32\]"):
        load_adapter(load_pretrained(tmp_path / "llama"), tmp_path / "a")


@KIND
def test_virtual_tokens_are_counted_without_sharded_weights(kind, tmp_path):
    write("llama", tmp_path / "base")
    model = attach(load_pretrained(tmp_path / "base"), SPECS[kind]).to("meta")
    adapter = model.prefix or model.soft_prompt
    adapter.forward = None  # calling it would be an error
    assert model.virtual_tokens() == P
    with disabled(model):
        assert model.virtual_tokens() == 0
