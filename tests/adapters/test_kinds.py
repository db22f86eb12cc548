"""Every kind of adapter on every kind of architecture: trained, saved, opened in plain peft and here; and peft's own here.

A new kind is one more entry of `KINDS`, and of `THEIRS` where peft makes it.
"""

import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.testing import assert_close

from alignment.adapters import (
    DoRASpec,
    IA3Spec,
    LoRASpec,
    attach,
    disabled,
    load_adapter,
    merge_adapter,
    read_spec,
    save_adapter,
)
from alignment.adapters.attach import merged_state
from alignment.models.huggingface.checkpoint import load_pretrained
from tests.adapters.tiny_models import MODELS, write

ARCHITECTURES = ("llama", "qwen3", "gemma3_text", "gpt2", "bert", "t5", "gptj", "stablelm", "gpt_neox", "phi3")
RARE = ("stablelm", "gpt_neox", "phi3")  # the last two: rows of a fused matrix in turn, and a fused gate and up
NORMS = {
    "llama": "model.norm", "qwen3": "model.norm", "gemma3_text": "model.norm", "gpt2": "ln_f", "bert": "embeddings.LayerNorm",
    "t5": "decoder.final_layer_norm", "gptj": "ln_f", "stablelm": "model.norm", "gpt_neox": "final_layer_norm", "phi3": "model.norm",
}  # fmt: skip
KINDS = {
    "lora": lambda name: LoRASpec(rank=3, alpha=6.0),
    "dora": lambda name: DoRASpec(rank=2, alpha=4.0),
    "ia3": lambda name: (
        IA3Spec(layers=("k_proj", "v_proj"), feedforward=("down_proj",)) if name == "stablelm" else IA3Spec()
    ),
    "pissa": lambda name: LoRASpec(rank=2, alpha=4.0, init="pissa"),
    "patterns": lambda name: LoRASpec(
        rank=2, alpha=3.0, rank_stabilized=True, layers="all-linear", rank_pattern={r"[01]\..*(value|v_proj|v)": 4},
        alpha_pattern={r"1\..*(key|k_proj|k)": 5.0},
    ),
    "token rows": lambda name: LoRASpec(rank=2, token_rows=(3, 9, 100)),
    "modules": lambda name: LoRASpec(rank=2, modules_to_save=(NORMS[name],)),
}  # fmt: skip
SKIPPED = {("token rows", "bert"): "peft leaves out the bias of a head that is tied to the rows"}
FULL_ROWS = ("lora", "dora", "ia3")  # on every architecture; of the rest, some combinations are slow tests
FEW = ("llama", "gpt2")


def cases(kinds):
    """Every kind on every architecture, rarer combinations marked slow."""
    for kind in kinds:
        for name in ARCHITECTURES:
            usual = name not in RARE and (kind in FULL_ROWS or name in FEW)
            yield pytest.param(kind, name, marks=[] if usual else [pytest.mark.slow])


IDS = torch.randint(3, 101, (2, 13), generator=torch.Generator().manual_seed(4))
TARGETS = torch.randint(3, 101, (2, 7), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """`bases(name)` -> directory of a random model of transformers, each made once."""
    made = {}

    def base(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            write(name, made[name])
        return made[name]

    return base


def plain(directory, name):
    """The base as transformers opens it."""
    return getattr(transformers, MODELS[name][0]).from_pretrained(directory).eval()


def logits(model, name):
    if name == "t5":
        return model(input_ids=IDS, decoder_input_ids=TARGETS).logits
    return model(input_ids=IDS).logits


def loss_of(model, name):
    wanted = (TARGETS if name == "t5" else IDS)[:, 1:]
    return F.cross_entropy(logits(model, name)[:, :-1].flatten(0, 1), wanted.flatten())


def train(model, name, steps=20, learning_rate=3e-3):
    """Losses of some steps on one batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, name)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def base_weights(model):
    """The weights that are not the adapter's, by the names of the model without one."""
    adapter = ("lora_", "ia3_l", ".modules_to_save.", "token_rows", "prefix.")
    return {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): value
        for name, value in model.state_dict().items()
        if not any(word in name for word in adapter)
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "name"), cases(KINDS))
def test_trained_saved_opened_in_peft_and_here_switched_off_and_merged(bases, tmp_path, kind, name):
    from peft import PeftModel

    base = bases(name)
    torch.manual_seed(1)
    model = attach(load_pretrained(base), KINDS[kind](name))
    with torch.no_grad():
        start = logits(model, name)
    losses = train(model, name)
    assert losses[-1] < losses[0] - 0.02, losses
    before, after = load_pretrained(base).state_dict(), base_weights(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[each], before[each]) for each in before)
    save_adapter(model, tmp_path, base=str(base))
    theirs = PeftModel.from_pretrained(plain(base, name), tmp_path).eval()
    again = load_adapter(load_pretrained(base), tmp_path)
    with torch.no_grad():
        trained, untrained = logits(model, name), logits(load_pretrained(base), name)
        assert_close(start, untrained, atol=1e-4 if kind == "pissa" else 1e-5, rtol=0)
        if (kind, name) not in SKIPPED:
            assert_close(logits(theirs, name), trained, atol=1e-5, rtol=1e-5)
        # PiSSA is two updates in training and one in the file; several scales in one fused matrix become one.
        rounded = kind == "pissa" or (kind == "patterns" and name in ("gpt2", "gpt_neox", "phi3"))
        assert_close(logits(again, name), trained, atol=1e-5 if rounded else 0, rtol=0)
        with disabled(model):
            assert torch.equal(logits(model, name), untrained)
        assert torch.equal(logits(model, name), trained)
        merged = merged_state(model, model.state_dict())
        assert_close(logits(merge_adapter(model), name), trained, atol=1e-4, rtol=1e-4)
    assert_close(merged, dict(model.state_dict()), atol=1e-5, rtol=1e-5)
    assert model.state_dict().keys() == before.keys()
    save_adapter(again, tmp_path / "again", base=str(base))
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    assert first.keys() == second.keys() and all(
        torch.equal(first[each], second[each]) or (rounded and torch.allclose(first[each], second[each]))
        for each in first
    )
    assert read_spec(tmp_path) == read_spec(tmp_path / "again")


LINEAR = {
    "llama": ["q_proj", "v_proj", "down_proj"], "qwen3": ["k_proj", "gate_proj"], "gemma3_text": ["o_proj", "up_proj"],
    "gpt2": ["c_attn", "c_fc"], "bert": ["query", "output.dense"], "t5": ["q", "wi"], "gptj": ["q_proj", "fc_in"],
    "stablelm": ["q_proj", "up_proj"], "gpt_neox": ["query_key_value", "dense_h_to_4h"],
    "phi3": ["qkv_proj", "gate_up_proj"],
}  # fmt: skip
FACTORS = {  # key, value and feed-forward, as the paper has it
    "llama": (["k_proj", "v_proj"], ["down_proj"]), "gpt2": (["c_attn"], ["mlp.c_proj"]),
    "bert": (["key", "value"], ["output.dense"]), "t5": (["k", "v"], ["wo"]), "gptj": (["k_proj", "v_proj"], ["fc_out"]),
    "gpt_neox": (["query_key_value"], ["dense_4h_to_h"]), "phi3": (["qkv_proj"], ["down_proj"]),
}  # fmt: skip
for _name in ("qwen3", "gemma3_text", "stablelm"):
    FACTORS[_name] = FACTORS["llama"]
EMBEDDING = {"gpt_neox": "embed_in", "gpt2": "wte", "bert": "word_embeddings", "t5": "shared", "gptj": "wte"}


def their_config(kind, name):
    from peft import IA3Config, LoraConfig

    if kind == "ia3":
        outputs, inputs = FACTORS[name]
        return IA3Config(target_modules=outputs + inputs, feedforward_modules=inputs)
    options = {
        "lora": {"use_rslora": True},
        "dora": {"use_dora": True},
        "patterns": {"rank_pattern": {LINEAR[name][0]: 5}, "alpha_pattern": {r"1\..*" + LINEAR[name][1]: 3}},
        "layers": {"layers_to_transform": [1], "lora_dropout": 0.1},
        "token rows": {"trainable_token_indices": {EMBEDDING.get(name, "embed_tokens"): [4, 50]}},
        "modules": {"modules_to_save": [NORMS[name]]},
    }[kind]
    return LoraConfig(r=3, lora_alpha=6, target_modules=LINEAR[name], **options)


THEIRS = ("lora", "dora", "ia3", "patterns", "layers", "token rows", "modules")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "name"), [case for case in cases(THEIRS) if case.values not in SKIPPED])
def test_an_adapter_trained_with_plain_peft_opens_here(bases, tmp_path, kind, name):
    from peft import get_peft_model

    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = get_peft_model(plain(bases(name), name), their_config(kind, name)).eval()
    train(theirs, name, steps=5, learning_rate=1e-2)
    theirs.save_pretrained(tmp_path)
    ours = load_adapter(load_pretrained(bases(name)), tmp_path)
    with torch.no_grad():
        assert_close(logits(ours, name), logits(theirs, name), atol=1e-5, rtol=1e-5)
        with disabled(ours):
            assert not torch.allclose(logits(ours, name), logits(theirs, name), atol=1e-3)
