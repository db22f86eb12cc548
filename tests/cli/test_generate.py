"""`alignment generate` on a tiny model: how prompts are read, where responses end, and that both are said."""

import json
from pathlib import Path

import pytest

from alignment import generate, load_model, load_tokenizer
from alignment.adapters import LoRASpec, PrefixSpec, attach, save_adapter
from alignment.cli import main
from tests.adapters.tiny_models import disturb
from tests.cli.test_chat import CHAT
from tests.conftest import write_lines


@pytest.fixture
def model(tmp_path, write_checkpoint) -> Path:
    """A model directory of the test's own."""
    return Path(write_checkpoint(tmp_path / "model", "llama"))


@pytest.fixture
def answers(model, capsys):
    """Runs `alignment generate`; gives the token ids of its rows and what stood on standard error."""

    def run(*arguments: str) -> tuple[list[list[int]], str]:
        code = main(["generate", "--model", str(model), "max_new_tokens=6", *arguments])
        out, err = capsys.readouterr()
        assert code == 0, err
        return [json.loads(line)["token_ids"] for line in out.splitlines()], err

    return run


def directly(model: Path, prompt) -> list[list[int]]:
    return generate(load_model(str(model)), load_tokenizer(str(model)), [prompt], max_new_tokens=6).token_ids


def test_a_prompt_is_read_in_both_directions_where_that_is_asked_for(model, answers):
    causal, _ = answers("--prompt", "Where is the spa?", "--raw", "temperature=0")
    prefix, _ = answers("--prompt", "Where is the spa?", "--raw", "temperature=0", "prefix_mask=true")
    loaded = load_model(str(model))
    loaded.prefix_mask = True
    [expected] = generate(
        loaded, load_tokenizer(str(model)), ["Where is the spa?"], max_new_tokens=6, temperature=0.0
    ).token_ids
    assert prefix == [expected] != causal


def test_a_prompt_goes_through_the_chat_template_where_the_model_has_one(model, answers):
    (model / "chat_template.jinja").write_text(CHAT)
    templated, said = answers("--prompt", "Where is the spa?")
    assert templated == directly(model, [{"role": "user", "content": "Where is the spa?"}])
    assert said.startswith("each prompt goes through the model's chat template (--raw reads it as it is); ")
    raw, said = answers("--prompt", "Where is the spa?", "--raw")
    assert raw == directly(model, "Where is the spa?") != templated
    assert said.startswith("prompts are read as they are, without the model's chat template (--raw); ")


def test_texts_and_messages_of_a_file_go_the_same_way(model, answers, tmp_path):
    (model / "chat_template.jinja").write_text(CHAT)
    for name, prompt in (("texts", "Hi"), ("messages", [{"role": "user", "content": "Hi"}])):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
    texts, messages = (answers("--prompts", str(tmp_path / f"{name}.jsonl"))[0] for name in ("texts", "messages"))
    assert texts == messages


def test_messages_cannot_be_read_raw(model, tmp_path, capsys):
    (model / "chat_template.jinja").write_text(CHAT)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "Hi"}]}) + "\n")
    assert main(["generate", "--model", str(model), "--prompts", str(tmp_path / "rows.jsonl"), "--raw"]) == 2
    assert "prompt 0: is a list of messages, which only a chat template can read" in capsys.readouterr().err


def test_without_a_template_prompts_are_read_as_they_are(model, answers):
    tokens, said = answers("--prompt", "Where is the spa?")
    assert tokens == directly(model, "Where is the spa?")
    assert said.startswith("prompts are read as they are: the model has no chat template; ")


@pytest.mark.parametrize(
    ("stored", "unused"),
    [
        (None, ""),
        ("same", ""),
        (["same"], ""),
        (["same", 5, 4], "; generation_config.json also names {4} (4), {5} (5), which does not end a response here"),
    ],
)
def test_tokens_that_end_a_response_are_named(model, answers, tokenizer, stored, unused):
    end = tokenizer.eos_token_id
    ids = end if stored == "same" else stored and [end if token == "same" else token for token in stored]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    said = answers("--prompt", "a")[1]
    names = {4: tokenizer.convert_ids_to_tokens(4), 5: tokenizer.convert_ids_to_tokens(5)}
    wanted = f"a response ends at {tokenizer.eos_token} ({end})"
    for token, name in names.items():
        unused = unused.replace(f"{{{token}}}", name)
    assert said == f"prompts are read as they are: the model has no chat template; {wanted}{unused}\n"


@pytest.mark.parametrize("content", ["{", "[1]", '{"eos_token_id": "end"}'])
def test_a_broken_generation_config_is_named(model, capsys, content):
    (model / "generation_config.json").write_text(content)
    assert main(["generate", "--model", str(model), "--prompt", "a", "max_new_tokens=2"]) == 2
    assert "generation_config.json: " in capsys.readouterr().err


def test_ppo_keeps_in_its_lineage_which_tokens_end_a_response(stage, tokenizer):
    notes = json.loads((stage("ppo") / "lineage.json").read_text())["notes"]
    assert f"a response ends at {tokenizer.eos_token} ({tokenizer.eos_token_id})" in notes


def test_the_column_adapter_names_the_adapter_of_each_row(model, tmp_path, capsys):
    options = []
    for number, (name, spec) in enumerate({"lora": LoRASpec(rank=2), "prefix": PrefixSpec(tokens=4)}.items()):
        save_adapter(disturb(attach(load_model(str(model)), spec), seed=number), tmp_path / name, base=str(model))
        options += ["--adapters", f"{name}={tmp_path / name}"]
    rows, file = [("prefix", "Hi"), (None, "Hi"), ("lora", "Where is"), ("prefix", "Where")], tmp_path / "rows.jsonl"
    write_lines(file, ({"prompt": text, "adapter": name} for name, text in rows))
    command = ["generate", "--model", str(model), "--prompts", str(file), "max_new_tokens=8", "temperature=0"]
    assert main([*command, *options]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["adapter"], row["prompt"]) for row in found] == rows
    tokenizer = load_tokenizer(str(model))
    for row in found:
        alone = load_model(str(model if row["adapter"] is None else tmp_path / row["adapter"]))
        wanted = generate(alone, tokenizer, [row["prompt"]], max_new_tokens=8, temperature=0)
        assert row["token_ids"] == wanted.token_ids[0]

    for arguments, why in [
        ([*command, *options[:2]], "rows.jsonl:1: there is no adapter 'prefix'; --adapters gives lora"),
        ([*command, "--adapters", "lora"], "--adapters 'lora': write the adapter's name = its directory"),
        ([*command[:3], "--prompt", "Hi", *options], "--adapters needs --prompts FILE"),
        ([*command, *options, "num_beams=2"], "beam search takes none"),
    ]:
        assert main(arguments) == 2 and why in capsys.readouterr().err
