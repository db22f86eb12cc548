"""New tokens in a vocabulary: their rows, ties, saved files, and training on (H21)."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from alignment import load_model, load_tokenizer
from alignment.adapters import LoRASpec
from alignment.cli import main
from alignment.commands.export import export_model
from alignment.data.config import DataConfig
from alignment.data.rows.records import Demonstration
from alignment.data.text.chat import stop_token_ids
from alignment.data.tokenize import tokenize_demonstrations
from alignment.data.tokenizers.tokenizer import encode
from alignment.errors import UserError
from alignment.models.huggingface.checkpoint import load_language_model
from alignment.models.new_weights import grow_vocabulary
from alignment.training import TrainingConfig
from tests.conftest import write_lines
from tests.stopping import assert_goes_on


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_h21_new_tokens_start_at_the_mean_everywhere(family, checkpoints, tmp_path):
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
def test_h21_a_model_with_new_tokens_is_trained_saved_and_loaded(adapter, checkpoints, make_stage, tmp_path, world):
    from transformers import AutoModelForCausalLM

    source = str(export_model(checkpoints["gpt2"], None, str(tmp_path / "grown"), chat_template="chatml"))
    data = DataConfig(train=world["demonstrations"], max_length=256, as_messages=True)
    run, config = make_stage("sft", source, tmp_path / "run", chat_template="chatml", adapter=adapter, data=data)
    trained = str(run(config))
    ids = torch.tensor([[3, 4, len(load_tokenizer(trained)) - 1, 5]])
    logits = load_model(trained)(ids).logits
    assert_close(load_model(trained)(ids).logits, logits, rtol=0, atol=0)
    assert not torch.equal(load_model(source)(ids).logits, logits)
    if adapter is None:
        assert_close(AutoModelForCausalLM.from_pretrained(trained)(ids).logits, logits, rtol=1e-4, atol=1e-5)


def test_a_template_without_its_tokens_is_refused_early(checkpoints, make_stage, tmp_path):
    run, config = make_stage("sft", checkpoints["gpt2"], tmp_path, chat_template="chatml")
    with pytest.raises(UserError, match=r"no special token <\|im_start\|>.*alignment export"):
        run(config)


# Tokens of one's own

TURNS = (
    "{% for message in messages %}{{ '<turn>' + message['role'] + '\n' + message['content'] + '</turn>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>assistant\n' }}{% endif %}"
)
TOOLS, TURN = ("<tool>", "</tool>"), ("<turn>", "</turn>")


def write_rows(path, rows):
    write_lines(path, rows)
    return DataConfig(train=str(path), max_length=256)


@pytest.fixture
def calls(tmp_path):
    """Demonstrations whose responses call a tool."""
    prompts = [f"How is the {place}?" for place in ("pool", "bar", "room", "staff")]
    rows = [{"prompt": prompt, "completion": f" <tool>look {number}</tool>"} for number, prompt in enumerate(prompts)]
    return write_rows(tmp_path / "calls.jsonl", rows)


def equals_transformers(directory: str, ids: list[int]) -> bool:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs, tokens = AutoModelForCausalLM.from_pretrained(directory), torch.tensor([ids])
    assert AutoTokenizer.from_pretrained(directory).get_vocab() == load_tokenizer(directory).get_vocab()
    assert theirs.config.vocab_size == load_model(directory).trunk.embed.num_embeddings
    return torch.allclose(load_model(directory)(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_export_adds_tokens_that_a_text_has_at_the_mean_of_the_others(family, checkpoints, tmp_path, capsys):
    source, output = checkpoints[family], str(tmp_path / "grown")
    words = ["export", "--model", source, "--output", output]
    assert main([*words, "--add-token", "<tool>", "--add-token", "</tool>", "--add-special-token", "<turn>"]) == 0
    assert "<tool>, </tool>, <turn>" in capsys.readouterr().err
    tokenizer, known = load_tokenizer(output), len(load_tokenizer(source))
    # The tool's two strings are one token each in any text, and stay when special tokens are left out of it.
    assert encode(tokenizer, ["<tool></tool>"]) == [[known, known + 1]]
    assert tokenizer.decode([known, known + 1, known + 2], skip_special_tokens=True) == "<tool></tool>"
    # A control token is one token where a template writes it, and plain text in a row.
    assert encode(tokenizer, ["<turn>"], control_tokens=True) == [[known + 2]]
    assert known + 2 not in encode(tokenizer, ["<turn>"])[0]
    old, new = load_model(source), load_model(output)
    for before, after in ((old.trunk.embed, new.trunk.embed), (old.head, new.head)):
        assert torch.equal(after.weight[:known], before.weight[:known])
        assert_close(after.weight[known:], before.weight[:known].mean(0).expand(3, -1), rtol=1e-6, atol=1e-7)
    assert equals_transformers(output, [3, known, 5, known + 1, known + 2])


def test_export_adds_the_control_tokens_of_a_template_file(checkpoints, tmp_path):
    (tmp_path / "turns.jinja").write_text(TURNS)
    give = {"chat_template": str(tmp_path / "turns.jinja")}
    with pytest.raises(UserError, match="no control token"):
        export_model(checkpoints["llama"], None, str(tmp_path / "no"), **give)
    output = str(export_model(checkpoints["llama"], None, str(tmp_path / "out"), add_special_tokens=TURN, **give))
    tokenizer, known = load_tokenizer(output), len(load_tokenizer(checkpoints["llama"]))
    assert tokenizer.chat_template == TURNS and known + 1 in stop_token_ids(tokenizer)
    assert known + 1 in json.loads(Path(output, "generation_config.json").read_text())["eos_token_id"]


@pytest.mark.parametrize(
    ("ordinary", "special", "problem"),
    [
        (("</s>",), (), "already"), (("a",), (), "already"), (("",), (), "blank"), ((), (" \n",), "blank"),
        (("<q>", "<q>"), (), "twice"), (("<q>",), ("<q>",), "twice"), (("", "a"), (), r"blank(.|\n)*already"),
    ],
)  # fmt: skip
def test_tokens_that_cannot_be_added_are_refused_before_weights_are_read(
    ordinary, special, problem, checkpoints, make_stage, tmp_path
):
    source = tmp_path / "without weights"
    shutil.copytree(checkpoints["llama"], source, ignore=shutil.ignore_patterns("*.safetensors"))
    new = {"add_tokens": ordinary, "add_special_tokens": special}
    with pytest.raises(UserError, match=problem):
        export_model(str(source), None, str(tmp_path / "out"), **new)
    assert not (tmp_path / "out").exists()
    run, config = make_stage("sft", str(source), tmp_path / "run", **new)
    with pytest.raises(UserError, match=problem):
        run(config)


def test_new_rows_of_unread_weights_are_those_of_read_ones(checkpoints):
    """A rank of FSDP2 or ZeRO-3 has read no weights yet; it reads embedding and head whole, and the rest later."""
    for family in ("gpt2", "llama"):
        read, unread = (load_language_model(checkpoints[family], device=device) for device in ("cpu", "meta"))
        for model in (read, unread):
            grow_vocabulary(model, 384, 386)
        assert torch.equal(unread.trunk.embed.weight, read.trunk.embed.weight)
        assert torch.equal(unread.head.weight, read.head.weight)
        assert hasattr(unread.get_parameter("trunk.norm.weight"), "stored")


@pytest.mark.parametrize("kind", ["sft", "pretrain"])
def test_a_stage_adds_tokens_trains_their_rows_and_goes_on_bit_for_bit(kind, calls, checkpoints, make_stage, tmp_path):
    if kind == "pretrain":
        calls = write_rows(tmp_path / "texts.jsonl", [{"text": f"Go <tool>look {n}</tool>"} for n in range(4)])
    settings = {"data": calls, "add_tokens": (*TOOLS, "<idle>"), "training": TrainingConfig(batch_size=2, epochs=2)}
    make = partial(make_stage, kind, checkpoints["llama"], **settings)
    trained = str(assert_goes_on(lambda name: make(output=tmp_path / name), 2, tmp_path))
    known = len(load_tokenizer(checkpoints["llama"]))
    assert encode(load_tokenizer(trained), ["<tool></tool><idle>"]) == [[known, known + 1, known + 2]]
    start, end = load_model(checkpoints["llama"]).trunk.embed.weight, load_model(trained).trunk.embed.weight
    # The tokens of the rows move away from the mean; the embedding of one that no row has stays there.
    moved = (end[known:] - start[:known].mean(0)).abs().amax(1)
    assert len(end) == known + 3 and min(moved[:2]) > 1e-4 and moved[2] < 1e-6
    assert equals_transformers(trained, [3, known, 5, known + 1])


def test_control_tokens_are_added_before_the_template_is_checked(checkpoints, make_stage, tmp_path):
    """ "<turn>" in a user's text stays text; the template's own are the new tokens, and DPO starts from what is saved."""
    talk = [{"role": "user", "content": "Hi <turn>"}, {"role": "assistant", "content": "Hello"}]
    data = write_rows(tmp_path / "talk.jsonl", [{"messages": talk}] * 4)
    new = {"chat_template": TURNS, "add_special_tokens": TURN, "training": TrainingConfig(batch_size=4, max_steps=1)}
    run, config = make_stage("sft", checkpoints["gpt2"], tmp_path / "run", data=data, **new)
    trained = str(run(config))
    tokenizer, known = load_tokenizer(trained), len(load_tokenizer(checkpoints["gpt2"]))
    [example] = tokenize_demonstrations([Demonstration(talk[:1], "Hello", "1")], tokenizer, 256)[0]
    assert example.ids.count(known) == example.ids.count(known + 1) == 2
    run, config = make_stage("dpo", trained, tmp_path / "dpo", training=TrainingConfig(batch_size=8, max_steps=1))
    assert load_model(str(run(config))).trunk.embed.num_embeddings == known + 2


def test_with_an_adapter_export_adds_tokens_and_token_rows_train(calls, checkpoints, make_stage, tmp_path):
    for kind in ("sft", "pretrain"):
        with pytest.raises(ValueError, match=r"alignment export.*token_rows"):
            make_stage(kind, checkpoints["llama"], tmp_path, add_tokens=TOOLS, adapter=LoRASpec(rank=2))
    base = str(export_model(checkpoints["llama"], None, str(tmp_path / "base"), add_tokens=TOOLS))
    spec = LoRASpec(rank=2, token_rows=(384, 385))  # 384 tokens were there
    run, config = make_stage("sft", base, tmp_path / "run", data=calls, adapter=spec)
    trained = str(run(config))
    rows = [
        load_model(source).trunk.embed.weight
        for source in (base, str(export_model(trained, None, str(tmp_path / "m"))))
    ]
    assert torch.equal(rows[0][:384], rows[1][:384]) and not torch.equal(rows[0][384:], rows[1][384:])
    run, config = make_stage("sft", trained, tmp_path / "more", data=calls, add_tokens=("<new>",))
    with pytest.raises(UserError, match=r"is an adapter.*alignment export"):
        run(config)


@pytest.mark.parametrize(("kind", "advice"), [("bert", "is an encoder"), ("mpt", "own decoder")])
def test_a_start_of_another_architecture_gets_no_tokens(kind, advice, checkpoints, make_stage, tmp_path):
    source = shutil.copytree(checkpoints["llama"], tmp_path / "start")
    (source / "config.json").write_text(json.dumps({"model_type": kind, "architectures": ["MptForCausalLM"]}))
    run, config = make_stage("sft", str(source), tmp_path / "run", add_tokens=TOOLS)
    with pytest.raises(UserError, match=advice):
        run(config)


def test_plan_reads_rows_with_the_new_tokens(calls, checkpoints, tmp_path, capsys):
    (tmp_path / "own.yaml").write_text(
        f"policy: {checkpoints['llama']}\noutput: {tmp_path}/out\ndata: {{train: {calls.train}, max_length: 64}}\n"
        f"chat_template: {json.dumps(TURNS)}\nadd_tokens: ['<tool>']\nadd_special_tokens: ['<turn>', '</turn>']\n"
    )
    assert main(["plan", str(tmp_path / "own.yaml"), "--stage", "sft"]) == 0
    assert "4 rows" in capsys.readouterr().out
