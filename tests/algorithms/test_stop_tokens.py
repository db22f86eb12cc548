"""Saved models tell other programs where training told them to stop, and how to find a text's last token."""

import json

import pytest
import torch
from torch.testing import assert_close

from alignment import generate, load_model, load_reward_model, load_tokenizer
from alignment.adapters import LoRASpec, PrefixSpec
from alignment.commands.export import export_model
from alignment.data.config import DataConfig
from alignment.data.text.chat import stop_token_ids
from alignment.data.tokenizers.tokenizer import save_tokenizer
from alignment.data.tokenizers.train import train_bpe
from alignment.models.build import build_language_model
from alignment.models.huggingface.checkpoint import save_model
from alignment.training import OptimConfig, TrainingConfig
from tests.data.conftest import CHATML, TURNS

QUESTION = [{"role": "user", "content": "How are you?"}]
ANSWER = {"role": "assistant", "content": "I am fine."}
LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
         "num_attention_heads": 2, "max_position_embeddings": 320}  # fmt: skip


@pytest.fixture(scope="module")
def chatml():
    """A tokenizer whose template ends turns with another token than EOS."""
    return train_bpe([QUESTION[0]["content"], ANSWER["content"]], 264, TURNS, chat_template=CHATML)


@pytest.fixture(scope="module")
def write_base(chatml):
    """`write_base(folder, **config)` -> a small base model that knows EOS only."""

    def write(folder, **config):
        special = {"bos_token_id": chatml.bos_token_id, "eos_token_id": chatml.eos_token_id}
        torch.manual_seed(0)
        folder.mkdir()
        save_model(build_language_model(LLAMA | {"vocab_size": len(chatml)} | special | config), folder)
        save_tokenizer(chatml, folder)
        return folder

    return write


@pytest.fixture(scope="module")
def learn(tmp_path_factory, write_base):
    """`learn(adapter, generation_config)` -> the model directory of a run that has learnt one answer by heart."""
    from alignment.algorithms import sft

    def run(adapter=None, generation_config=None):
        folder = tmp_path_factory.mktemp("learn")
        base = write_base(folder / "base")
        if generation_config is not None:
            (base / "generation_config.json").write_text(json.dumps(generation_config))
        (folder / "rows.jsonl").write_text((json.dumps({"messages": [*QUESTION, ANSWER]}) + "\n") * 4)
        config = sft.SFTConfig(
            policy=str(base), data=DataConfig(train=str(folder / "rows.jsonl")), output=str(folder / "run"),
            adapter=adapter, optim=OptimConfig(learning_rate=1e-2), training=TrainingConfig(batch_size=4, max_steps=50),
        )  # fmt: skip
        return sft.run(config)

    return run


@pytest.fixture(scope="module")
def learnt(learn):
    """Without an adapter, and with one."""
    carried = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [7, 3]}  # an ordinary token, and <|im_start|>
    return {"full": learn(generation_config=carried), "lora": learn(LoRASpec(rank=16))}


def continued(directory):
    """What transformers writes, greedily."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = torch.cat([torch.tensor([[tokenizer.bos_token_id]]), ids["input_ids"]], dim=1)
    model = AutoModelForCausalLM.from_pretrained(directory)
    return model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("kind", ["full", "exported", "merged"])
def test_transformers_stops_where_we_do(kind, learnt, tmp_path):
    directory = learnt["lora" if kind == "merged" else "full"]
    if kind != "full":
        directory = export_model(str(directory), None, str(tmp_path / "out"))
    tokenizer = load_tokenizer(str(directory))
    ours = generate(load_model(str(directory)), tokenizer, [QUESTION], max_new_tokens=40, temperature=0.0)
    assert ours.texts == ["I am fine."] and ours.token_ids[0][-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert continued(directory) == ours.token_ids[0]
    ends = [1, 4] if kind == "merged" else [1, 3, 4]  # with the control token that the base names
    assert sorted(stop_token_ids(tokenizer)) == ends
    for name in ("config.json", "generation_config.json"):
        assert json.loads((directory / name).read_text())["eos_token_id"] == ends, name
    assert json.loads((directory / "generation_config.json").read_text())["pad_token_id"] == tokenizer.pad_token_id


def test_a_generation_config_is_carried_along(learnt, tmp_path):
    directory = export_model(str(learnt["full"]), None, str(tmp_path / "out"))
    for folder in (learnt["full"], directory):
        config = json.loads((folder / "generation_config.json").read_text())
        assert config == {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 3, 4], "pad_token_id": 2}


def test_a_base_written_for_an_adapter_knows_its_stop_tokens_too(learnt, ran, tmp_path):
    ran(
        "sft", str(learnt["lora"]), tmp_path / "again", adapter=PrefixSpec(tokens=2),
        training=TrainingConfig(batch_size=4, max_steps=1),
    )  # fmt: skip
    assert json.loads((tmp_path / "again" / "base" / "generation_config.json").read_text())["eos_token_id"] == [1, 4]


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_generation_config_that_is_no_object_is_named(content, write_base, tmp_path):
    from alignment.errors import UserError

    base = write_base(tmp_path / "base")
    (base / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=r"base/generation_config\.json"):
        load_model(str(base))


def test_a_transformers_class_carries_its_generation_config_too(chatml, tmp_path):
    """Also one that transformers reads and refuses to write: a temperature without do_sample."""
    from transformers import AutoConfig, AutoModelForCausalLM

    foreign = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("stablelm", vocab_size=len(chatml), num_key_value_heads=2, **foreign)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    save_tokenizer(chatml, tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "do_sample": False}))
    directory = export_model(str(tmp_path / "base"), None, str(tmp_path / "out"))
    written = json.loads((directory / "generation_config.json").read_text())
    assert written == {"temperature": 0.6, "do_sample": False, "eos_token_id": [1, 4], "pad_token_id": 2}
    assert AutoConfig.from_pretrained(directory).eos_token_id == [1, 4]


@pytest.fixture(scope="module")
def judge(tmp_path_factory, write_base, make_stage):
    """`judge(pad, adapter)` -> the directory of a short reward run on a base with that padding token in its config."""

    def run(pad, adapter=None):
        folder = tmp_path_factory.mktemp("judge")
        base = write_base(folder / "base", pad_token_id=pad)
        few = TrainingConfig(batch_size=4, max_steps=2)
        run, config = make_stage("reward", str(base), folder / "run", adapter=adapter, training=few)
        return run(config)

    return run


def their_score(model, tokenizer, text):
    """What a classifier of transformers says of a text with its end token; its logits are [1, 1]."""
    with torch.no_grad():
        return model.eval()(torch.tensor([[*tokenizer(text).input_ids, tokenizer.eos_token_id]])).logits[0]


def notes_of(directory):
    return json.loads((directory.parent / "lineage.json").read_text())["notes"]


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_transformers_scores_alike_where_the_base_pads_with_its_end(kind, judge, tmp_path):
    from transformers import AutoModelForSequenceClassification

    directory = judge(1, LoRASpec(rank=4) if kind == "lora" else None)
    directory = export_model(str(directory), None, str(tmp_path / "out"))
    ours = load_reward_model(str(directory))
    theirs = AutoModelForSequenceClassification.from_pretrained(directory)
    for text in ("I am fine.", "How are you?"):
        assert_close(their_score(theirs, ours.tokenizer, text), ours.score([text]), atol=1e-5, rtol=0)


def test_a_reward_adapter_on_a_base_that_pads_with_its_end_token_says_so(judge, chatml):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    directory = judge(1, LoRASpec(rank=4))
    [note] = [note for note in notes_of(directory) if "pad_token_id" in note]
    assert "alignment export" in note and str(directory.parent.parent / "base") in note
    base = AutoModelForSequenceClassification.from_pretrained(directory.parent.parent / "base", num_labels=1)
    theirs = PeftModel.from_pretrained(base, directory)
    ours = load_reward_model(str(directory)).score(["I am fine."])
    assert (their_score(theirs, chatml, "I am fine.") - ours).abs() > 1e-3
    base.config.pad_token_id = None  # the way out that the note names
    assert_close(their_score(theirs, chatml, "I am fine."), ours, atol=1e-5, rtol=0)
    assert not any("pad_token_id" in note for note in notes_of(judge(2, LoRASpec(rank=4))))


def test_reward_says_that_its_score_head_is_new(judge, capsys):
    directory = judge(2)
    assert any(note.startswith("score head: new") for note in notes_of(directory))
    assert "score head: new" in capsys.readouterr().err
