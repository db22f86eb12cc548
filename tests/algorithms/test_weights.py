"""The types of weights in whole runs: no number changes with frozen weights in bfloat16; NF4 and int8 train on every stage."""

import json
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from alignment import load_model
from alignment.adapters import LoRASpec, PrefixSpec
from alignment.algorithms.dpo import DPOConfig
from alignment.algorithms.finetune import finetune
from alignment.algorithms.finetune.finetune import FinetuneConfig
from alignment.algorithms.finetune.model import unwrap
from alignment.algorithms.sft import SFTConfig
from alignment.commands.export import export_model
from alignment.commands.generate import generate_responses
from alignment.data.config import DataConfig
from alignment.data.tokenizers.tokenizer import save_tokenizer
from alignment.errors import UserError
from alignment.loading import Checkpoint, load_frozen_model
from alignment.models.build import build_model
from alignment.models.huggingface.checkpoint import load_language_model, load_pretrained, save_model
from alignment.models.quantization import quantization_of
from alignment.models.shared_weights import SharedWeights
from alignment.models.weights_config import WeightsConfig
from alignment.training import OptimConfig, TrainingConfig
from tests.algorithms.labeled_rows import write_rows
from tests.stopping import assert_goes_on

LORA = LoRASpec(rank=4, alpha=16.0)
TYPES = ("auto", "bfloat16", "float32")
TWO = TrainingConfig(batch_size=8, max_steps=2)


@pytest.fixture(scope="module")
def low(checkpoints, tokenizer, tmp_path_factory):
    """The tiny Llama in bfloat16."""
    folder = tmp_path_factory.mktemp("low")
    save_model(load_language_model(checkpoints["llama"], torch.bfloat16), folder)
    save_tokenizer(tokenizer, folder)
    return str(folder)


@pytest.fixture(scope="module")
def qwen(tokenizer, tmp_path_factory):
    """A tiny Qwen3 that transformers wrote, in bfloat16."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return str(folder)


def figures(rows):
    """Metrics without what depends on the clock."""
    return [{key: value for key, value in row.items() if not key.startswith(("tokens_per", "seconds"))} for row in rows]


def notes(output):
    return json.loads((Path(output) / "lineage.json").read_text())["notes"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_run_with_bfloat16_weights_has_the_numbers_of_float32_weights(
    kind, precision, low, ran, read_metrics, tmp_path
):
    training = replace(TWO, precision=precision)
    for name in ("auto", "float32"):
        ran(kind, low, tmp_path / name, adapter=LORA, weights=WeightsConfig(dtype=name), training=training)
    assert figures(read_metrics(tmp_path / "auto")) == figures(read_metrics(tmp_path / "float32"))
    adapters = [load_file(tmp_path / name / "model" / "adapter_model.safetensors") for name in ("auto", "float32")]
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[1])
    assert {x.dtype for x in adapters[0].values()} == {torch.float32}
    (note,) = [note for note in notes(tmp_path / "auto") if note.startswith("weights:")]
    assert "tensors frozen in bfloat16" in note and "numbers trained in float32" in note


def test_all_weights_train_in_float32_and_are_saved_so(low, ran, tmp_path):
    model = ran("sft", low, tmp_path, training=TWO)
    assert {x.dtype for x in load_file(model / "model.safetensors").values()} == {torch.float32}
    assert json.loads((model / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
@pytest.mark.parametrize("adapter", [LORA, PrefixSpec(tokens=3)], ids=["LoRA", "prefix"])
def test_every_stage_trains_on_quantized_weights(quantize, adapter, qwen, ran, read_metrics, tmp_path):
    pytest.importorskip("bitsandbytes")
    weights = WeightsConfig(quantize=quantize)
    shared = {"adapter": adapter, "weights": weights, "training": TWO}
    for kind in ("sft", "reward", "dpo"):
        ran(kind, qwen, tmp_path / kind, **shared)
        (note,) = [note for note in notes(tmp_path / kind) if note.startswith("weights:")]
        assert f"14 tensors frozen in {quantize} (" in note
    if adapter is LORA:  # a new prefix is no identity
        assert read_metrics(tmp_path / "dpo")[0]["loss"] == pytest.approx(0.693147, abs=2e-6)
    training = replace(TWO, max_steps=1)
    ran(
        "ppo", qwen, tmp_path / "ppo", reward_model=str(tmp_path / "reward" / "model"),
        **{**shared, "training": training},
    )  # fmt: skip
    assert read_metrics(tmp_path / "ppo")[0]["first_ratio_error"] < 1e-4
    adapter_config = json.loads((tmp_path / "dpo" / "model" / "adapter_config.json").read_text())
    named = (tmp_path / "dpo" / "model" / adapter_config["base_model_name_or_path"]).resolve()
    assert named == Path(qwen).resolve()  # the original, which peft quantizes itself


def test_dpo_on_nf4_resumes_to_the_bit(qwen, make_stage, tmp_path):
    pytest.importorskip("bitsandbytes")
    training = TrainingConfig(batch_size=8, max_steps=3, save_every_steps=1)
    changes = {"adapter": LORA, "weights": WeightsConfig(quantize="nf4"), "training": training}
    assert_goes_on(lambda name: make_stage("dpo", qwen, tmp_path / name, **changes), 1, tmp_path)


@pytest.mark.parametrize("quantize", [None, "nf4", "int8"])
def test_an_exported_adapter_is_the_trained_model_in_the_type_of_its_base(quantize, qwen, make_stage, tmp_path, capsys):
    pytest.importorskip("bitsandbytes")
    run, config = make_stage(
        "sft", qwen, tmp_path / "run", adapter=LORA, weights=WeightsConfig(quantize=quantize), training=TWO
    )
    adapter = str(run(config))
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # the base is rounded as in training
        merged = export_model(adapter, None, str(tmp_path / "merged"))
    assert {x.dtype for x in load_file(merged / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((merged / "config.json").read_text())["dtype"] == "bfloat16"
    exact = export_model(qwen, adapter, str(tmp_path / "exact"), dtype="float32")
    ids = torch.tensor([[5, 6, 7, 8]])
    trained = load_frozen_model(Checkpoint(adapter), SharedWeights(WeightsConfig(quantize=quantize)))
    with torch.no_grad():
        expected = trained(ids).logits
        torch.testing.assert_close(load_model(str(exact))(ids).logits, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(load_model(str(merged))(ids).logits, expected, rtol=0, atol=0.05)
    message = capsys.readouterr().err
    if quantize is None:
        assert "merged into" not in message
        return
    assert f"merged into the {quantize} weights" in message and "on average over 14 matrices" in message
    assert 0 < float(message.split("differ from those of")[1].split("by ")[1].split()[0]) < 1


@pytest.mark.parametrize("adapter", [LORA, PrefixSpec(tokens=3)], ids=["LoRA", "prefix"])
def test_an_adapter_over_weights_of_another_type_is_noted(adapter, qwen, ran, tmp_path):
    pytest.importorskip("bitsandbytes")
    trained = {"adapter": adapter, "training": TWO}
    policy = str(ran("sft", qwen, tmp_path / "sft", weights=WeightsConfig(quantize="nf4"), **trained))

    def noted(use):
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            use()
        return [text for each in recorded if "in nf4" in (text := str(each.message))]

    nf4 = WeightsConfig(quantize="nf4")
    assert not noted(lambda: load_model(policy, quantize="nf4"))
    assert not noted(lambda: ran("dpo", policy, tmp_path / "as trained", weights=nf4, **trained))
    (note,) = noted(lambda: load_model(policy, quantize="int8"))
    assert policy in note and "int8" in note
    settings = ["max_new_tokens=2"]
    for use in (
        lambda: load_model(policy),
        lambda: generate_responses(policy, None, ["Hello"], settings),
        lambda: generate_responses(qwen, policy, ["Hello"], settings),
        lambda: ran("sft", policy, tmp_path / "next", **trained),
        lambda: ran("sft", policy, tmp_path / "other kind", adapter=None, training=TWO),
    ):
        (note,) = noted(use)
        assert policy in note and "full" in note


def test_quantize_without_an_adapter_to_merge_is_refused(qwen, tmp_path):
    with pytest.raises(UserError, match="there is none to merge"):
        export_model(qwen, None, str(tmp_path / "out"), quantize="nf4")


def test_a_model_in_use_has_its_checkpoints_type_or_the_one_asked_for(low, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    settings = ["max_new_tokens=4", "temperature=0"]
    rows = [generate_responses(low, None, ["Hello"], settings, weights=WeightsConfig(dtype=name)) for name in TYPES]
    with torch.no_grad():
        logits = {name: load_model(low, name)(torch.tensor([[5, 6, 7]])).logits for name in TYPES}
    assert torch.equal(logits["auto"], logits["bfloat16"]) and logits["auto"].dtype == torch.bfloat16
    assert logits["float32"].dtype == torch.float32 and rows[0] == rows[1]
    output = export_model(low, None, str(tmp_path / "out"))
    assert {x.dtype for x in load_file(output / "model.safetensors").values()} == {torch.bfloat16}


# Fine-tuning


@pytest.fixture
def make_finetune(low, tokenizer, tmp_path):
    """`make_finetune("bert", "classification", output, **changes)`: a config over a bfloat16 checkpoint of a family."""

    def make(family, task, output, **changes):
        folder = tmp_path / family
        if family == "bert" and not folder.is_dir():
            torch.manual_seed(0)
            bert = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
            config = {"model_type": family, "max_position_embeddings": 128, "vocab_size": len(tokenizer), **bert}
            folder.mkdir()
            save_model(build_model(config, "language").to(torch.bfloat16), folder)
            save_tokenizer(tokenizer, folder)
        rows, held_out = (write_rows(tmp_path, task, 8 * (2 - seed), seed, f"{task}-{seed}.jsonl") for seed in (0, 1))
        settings = {
            "data": DataConfig(train=rows, evaluation=held_out, max_length=96),
            "optim": OptimConfig(learning_rate=3e-3, eps=1e-5), "adapter": LORA, "training": TWO,
        }  # fmt: skip
        policy = low if family == "llama" else str(folder)
        return FinetuneConfig(task=task, policy=policy, output=str(output), **{**settings, **changes})

    return make


@pytest.mark.parametrize(
    ("family", "task", "changes"),
    [
        ("bert", "classification", {}),
        ("bert", "token_classification", {}),
        ("llama", "classification", {"language_coef": 0.5}),
        ("llama", "pair_classification", {}),  # new rows in the embedding
    ],
)
def test_fine_tuning_in_bfloat16_has_the_numbers_of_float32(
    family, task, changes, make_finetune, read_metrics, tmp_path
):
    for name in ("auto", "float32"):
        weights = WeightsConfig(dtype=name)
        finetune.run(make_finetune(family, task, tmp_path / name, weights=weights, **changes))
    assert figures(read_metrics(tmp_path / "auto")) == figures(read_metrics(tmp_path / "float32"))
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("auto", "float32"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert {x.dtype for x in ours.values()} == {torch.float32}
    (note,) = [note for note in notes(tmp_path / "auto") if note.startswith("weights:")]
    assert "tensors frozen in bfloat16" in note
    assert not any("frozen in bfloat16" in note for note in notes(tmp_path / "float32"))


@pytest.mark.parametrize("quantize", ["nf4", "int8", None])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_fine_tuned_model_is_saved_with_the_values_of_its_weights(
    quantize, family, make_finetune, read_metrics, tmp_path, monkeypatch
):
    pytest.importorskip("bitsandbytes")
    trained, freeze = [], finetune.freeze
    monkeypatch.setattr(finetune, "freeze", lambda *each: trained.append(freeze(*each)) or trained[0])
    weights, coef = WeightsConfig(quantize=quantize), {"language_coef": 0.5} if family == "llama" else {}
    adapter = LORA if quantize else LoRASpec(rank=4, alpha=16.0, init="pissa")
    config = make_finetune(family, "classification", tmp_path / "run", weights=weights, adapter=adapter, **coef)
    output = finetune.run(config)
    (note,) = [note for note in notes(tmp_path / "run") if note.startswith("weights:")]
    assert f"tensors frozen in {quantize or 'bfloat16'} (" in note
    saved = load_pretrained(output, "sequence")
    model = unwrap(trained[0]).eval()
    assert quantization_of(model) == quantize and quantization_of(saved) is None
    assert {x.dtype for x in model.head.parameters()} == {torch.float32}
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(saved(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("Config", "weights", "message"),
    [
        (SFTConfig, WeightsConfig(quantize="nf4"), "weights.quantize nf4 needs `adapter`"),
        (DPOConfig, WeightsConfig(quantize="nf4"), "weights.quantize nf4 needs `adapter`"),
        (
            partial(FinetuneConfig, task="classification"),
            WeightsConfig(quantize="nf4"),
            "weights.quantize nf4 needs `adapter`",
        ),
        (SFTConfig, WeightsConfig(dtype="bfloat16"), "weights.dtype bfloat16 needs `adapter`.*training.precision=bf16"),
        (
            partial(FinetuneConfig, task="classification"),
            WeightsConfig(dtype="bfloat16"),
            "weights.dtype bfloat16 needs `adapter`.*training.precision=bf16",
        ),
    ],
)
def test_frozen_types_without_frozen_weights_are_refused(Config, weights, message):
    with pytest.raises(ValueError, match=message):
        Config(policy="p", data=DataConfig(train="d"), output="o", weights=weights)
    Config(policy="p", data=DataConfig(train="d"), output="o", weights=weights, adapter=LORA)
    Config(policy="p", data=DataConfig(train="d"), output="o", weights=WeightsConfig(dtype="float32"))


def test_a_reference_may_have_its_own_type():
    config = DPOConfig(policy="p", data=DataConfig(train="d"), output="o", weights=WeightsConfig(dtype="bfloat16"))
    assert config.adapter is None and config.weights.dtype == "bfloat16"
