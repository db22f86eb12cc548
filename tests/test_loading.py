"""Models and tokenizers from directories and the Hub, scoring, and export."""

import json
import shutil

import pytest
import torch
from torch.testing import assert_close

import alignment
from alignment import load_model, load_reward_model, load_tokenizer
from alignment.adapters import LoRASpec, PrefixSpec, attach, save_adapter
from alignment.commands.export import export_model
from alignment.data.text.chat import prompt_ids, response_ids
from alignment.errors import UserError
from alignment.files import read_json_object, write_json
from alignment.loading import same_vocabulary
from alignment.models.heads import score_labels
from alignment.models.huggingface.checkpoint import load_pretrained, load_scalar_model, save_model
from alignment.reward_model import load_reward_network
from tests.adapters.tiny_models import write

PAIRS = [
    ("Where is the spa?", " On floor seven."),
    ("When is breakfast?", " At nine, and it is good."),
    ("Why?", " No."),
]
TIGHT = {"atol": 1e-5, "rtol": 0}


@pytest.fixture
def judge(stage):
    return load_reward_model(str(stage("reward") / "model"))


def test_the_package_offers_its_verbs():
    loading = {"generate", "load_model", "load_reward_model", "load_tokenizer"}
    stages = {"pretrain", "sft", "reward", "dpo", "online_dpo", "ppo", "distill", "finetune", "best_of_n", "evaluate"}
    assert alignment.__all__ == sorted(loading | stages)
    assert all(callable(getattr(alignment, name)) for name in alignment.__all__)
    assert alignment.load_model is load_model
    with pytest.raises(AttributeError, match="no attribute 'load_modle'"):
        alignment.load_modle  # noqa: B018


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", torch.float16])
def test_a_model_comes_in_eval_mode_and_the_wanted_type(checkpoints, dtype):
    model = load_model(checkpoints["llama"], dtype=dtype)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert not model.training and model.source == "native"
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "a/b/c"])
def test_a_directory_that_is_not_there_is_named(name):
    with pytest.raises(UserError, match="no such model directory"):
        load_model(name)


def test_only_safe_files_are_fetched_from_the_hub(checkpoints, monkeypatch):
    asked = {}

    def fetch(name, **options):
        asked.update(name=name, **options)
        return checkpoints["llama"]

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert load_model("someone/model").source == "native"
    assert asked["name"] == "someone/model"
    assert {pattern.rpartition(".")[2] for pattern in asked["allow_patterns"]} == {
        "safetensors", "json", "txt", "model", "jinja", "md",
    }  # fmt: skip


def test_a_model_of_the_hub_is_asked_for_once_a_process(checkpoints, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *names, **_: asked.append(names) or checkpoints["llama"]
    )
    assert load_model("someone/model").source == load_model("someone/model").source
    assert len(asked) == 1


def test_a_hub_that_cannot_be_reached_is_a_users_error(monkeypatch):
    def fetch(name, **options):
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    with pytest.raises(UserError, match=r"someone/model.*ConnectionError"):
        load_model("someone/model")


def test_an_adapter_brings_its_base(stage, checkpoints):
    adapter = load_model(str(stage("sft lora") / "model"))
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        assert not torch.allclose(adapter(ids).logits, load_model(checkpoints["llama"])(ids).logits, atol=1e-3)


def test_an_adapter_without_a_tokenizer_uses_its_bases(stage, checkpoints, tmp_path, tokenizer):
    copied = tmp_path / "adapter"
    shutil.copytree(stage("sft lora") / "model", copied)
    config = json.loads((copied / "adapter_config.json").read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = checkpoints["llama"]  # it stays where it was
    (copied / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in copied.glob("*token*"):
        file.unlink()
    assert same_vocabulary(load_tokenizer(str(copied)), tokenizer)


# --- scores ---------------------------------------------------------------------------------------------------------


def test_a_score_does_not_depend_on_the_batch(judge):
    together = judge.score(PAIRS)
    assert together.shape == (3,) and together.dtype == torch.float32 and together.std() > 0
    assert_close(judge.score(PAIRS, micro_batch_tokens=1), together, **TIGHT)
    assert_close(torch.cat([judge.score([pair]) for pair in PAIRS]), together, **TIGHT)
    assert_close(judge.score(PAIRS[::-1]), together.flip(0), **TIGHT)


def test_a_padded_call_gives_the_same_scores(judge):
    documents = [prompt_ids(judge.tokenizer, p) + response_ids(judge.tokenizer, r) for p, r in PAIRS]
    width = max(map(len, documents))
    for side in ("left", "right"):
        ids, mask = torch.full((3, width), judge.tokenizer.pad_token_id), torch.zeros(3, width)
        for row, document in enumerate(documents):
            place = slice(len(document)) if side == "right" else slice(width - len(document), None)
            ids[row, place], mask[row, place] = torch.tensor(document), 1
        with torch.no_grad():
            assert_close(judge.model(ids, mask).logits[:, 0], judge.score(PAIRS), **TIGHT)


def test_a_pair_is_scored_as_it_was_trained_on(judge):
    """Prompt, response and the end token: the ids of `collate_pairs`."""
    from alignment.data.batches import collate_pairs
    from alignment.data.rows.records import Comparison
    from alignment.data.tokenize import tokenize_comparisons

    rows = [Comparison(p, r, r + " Indeed.", margin=None, row_id=p) for p, r in PAIRS]
    pairs, _ = tokenize_comparisons(rows, judge.tokenizer, 256)
    [batch] = collate_pairs(pairs, 10**6)
    with torch.no_grad():
        scores = judge.model(batch=batch.ragged).values[batch.ragged.last][:3]
    order = [PAIRS.index(next(pair for pair in PAIRS if pair[0] == name)) for name in batch.ragged.row_ids[:3]]
    assert_close(scores, judge.score([PAIRS[i] for i in order]), **TIGHT)


def test_a_policy_is_no_reward_model(checkpoints, stage):
    for family, architecture in (("llama", "LlamaForCausalLM"), ("gpt2", "GPT2LMHeadModel")):
        wanted = rf"this is no reward model but a language model \({architecture}\).*`alignment reward CONFIG policy="
        with pytest.raises(UserError, match=wanted):
            load_reward_model(checkpoints[family])
    with pytest.raises(UserError, match="no score head"):
        load_reward_model(str(stage("sft lora") / "model"))


@pytest.mark.parametrize("name", ["llama", "stablelm"])
@pytest.mark.parametrize("adapter", [None, LoRASpec(rank=2), PrefixSpec(tokens=2)], ids=["model", "LoRA", "prefix"])
def test_a_reward_model_is_no_policy(name, adapter, tmp_path):
    write(name, tmp_path / "base")
    model = load_scalar_model(tmp_path / "base", new_head="zero")
    if adapter is None:
        save_model(model, tmp_path / "reward")
    else:
        save_adapter(attach(model, adapter), tmp_path / "reward", base=str(tmp_path / "base"))
    with pytest.raises(UserError, match=r"reward model.*score head.*reward_model") as refused:
        load_model(str(tmp_path / "reward"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("labels", [{"num_labels": 3}, {"id2label": {"0": "bad", "1": "fair", "2": "good"}}])
@pytest.mark.parametrize("name", ["llama", "stablelm", "bert"])
def test_a_score_head_has_as_many_outputs_as_labels(name, labels, tmp_path):
    write(name, tmp_path / "base")
    model = load_pretrained(tmp_path / "base", "scalar", new_head=True, config=score_labels())
    save_model(model, tmp_path / "reward")
    load_pretrained(tmp_path / "reward", "scalar")
    config = read_json_object(tmp_path / "reward" / "config.json")
    for key in ("id2label", "label2id", "num_labels"):
        config.pop(key, None)
    write_json(tmp_path / "reward" / "config.json", config | labels)
    with pytest.raises(UserError, match=r"config\.json names 3 labels"):
        load_reward_network(str(tmp_path / "reward"))


# --- export ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sft", "sft lora", "sft lora gpt2"])
def test_an_exported_policy_is_one_plain_directory(name, stage, tmp_path):
    from transformers import AutoModelForCausalLM

    source = str(stage(name) / "model")
    output = export_model(source, None, str(tmp_path / "out"))
    assert not (output / "adapter_config.json").exists() and (output / "tokenizer.json").exists()
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        wanted = load_model(source)(ids).logits
        assert_close(load_model(str(output))(ids).logits, wanted, **TIGHT)
        assert_close(AutoModelForCausalLM.from_pretrained(output)(ids).logits, wanted, **TIGHT)


def test_an_adapter_may_be_put_on_a_named_model(stage, checkpoints, tmp_path):
    adapter = str(stage("sft lora") / "model")
    output = export_model(checkpoints["llama"], adapter, str(tmp_path / "out"))
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        assert_close(load_model(str(output))(ids).logits, load_model(adapter)(ids).logits, **TIGHT)


def test_a_prefix_cannot_be_exported_and_nothing_is_written(stage, tmp_path):
    with pytest.raises(UserError, match="cannot be merged"):
        export_model(str(stage("sft prefix") / "model"), None, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# --- the Hub --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "offline", "advice"),
    [
        ("GatedRepoError", False, "access has to be granted; accept the terms .* `hf auth login`"),
        ("RepositoryNotFoundError", False, "it has none of that name, or a private one; .* `hf auth login`"),
        ("LocalEntryNotFoundError", False, "it cannot be reached and the model is not in the cache; download it"),
        ("LocalEntryNotFoundError", True, "HF_HUB_OFFLINE is set and the model is not in the cache; unset it"),
    ],
)
def test_a_model_that_the_hub_does_not_give_says_why_and_what_to_do(monkeypatch, kind, offline, advice):
    import huggingface_hub

    error_class = getattr(huggingface_hub.errors, kind)

    def refuse(*arguments, **options):
        raise error_class.__new__(error_class)  # its own arguments are a response of the Hub's

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: offline)
    with pytest.raises(
        UserError, match=rf"^someone/model: no such directory, and the Hub did not give it \({kind}\): {advice}"
    ):
        load_model("someone/model")
