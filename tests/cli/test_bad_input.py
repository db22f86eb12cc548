"""What a user may get wrong, through the real command line: exit code 2 and one clear message each, before training."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from alignment.cli import main
from alignment.errors import UserError
from alignment.hotel_world.datasets import RowCounts, write_world


@pytest.fixture
def sft(tmp_path, world, checkpoints, capsys):
    """Runs `alignment sft` on good settings with some changed; gives the exit code and what stood on standard error."""

    def run(*changes: str, text: str | None = None) -> tuple[int, str]:
        config = tmp_path / "run.yaml"
        good = f"policy: {checkpoints['llama']}\noutput: {tmp_path}/out\ndata:\n  train: {world['demonstrations']}\n"
        config.write_text(good if text is None else text)
        code = main(["sft", str(config), "training.max_steps=1", *changes])
        return code, capsys.readouterr().err

    return run


@pytest.fixture
def broken_model(tmp_path, write_checkpoint):
    """A model directory of the test's own, to spoil."""
    return Path(write_checkpoint(tmp_path / "model", "llama"))


def check(outcome: tuple[int, str], *parts: str) -> None:
    code, message = outcome
    assert code == 2, message
    assert "Traceback" not in message
    for part in parts:
        assert part in message


def test_good_settings_run(sft):
    assert sft()[0] == 0


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (["optim.learning_rat=1e-3"], ["learning_rat", "learning_rate"]),
        (["training.batch_size=many"], ["training.batch_size", "many"]),
        (["optim.learning_rate=-1.0", "data.train=none.jsonl"], ["learning_rate", "-1", "none.jsonl: no such file"]),
        (["policy=./nowhere"], ["./nowhere"]),
        (["adapter={kind: lora, layers: '(.*)*(.*)*(.*)*!'}"], ["adapter.layers", "names no linear layer"]),
        (["adapter={kind: lora, layers: '(a|[a-z]|[a-z.]|[\\w.])+[#!]'}"], ["adapter.layers", "more than 1 seconds"]),
    ],
)
def test_a_wrong_setting_is_named_with_its_key(sft, changes, parts):
    check(sft(*changes), *parts)


@pytest.mark.parametrize(
    "command",
    ["generate --model nowhere --prompt Hi --output OUT/rows.jsonl", "evaluate winrate evaluate/tiny output=OUT",
     "evaluate benchmarks evaluate/benchmarks_tiny output=OUT", "evaluate reward evaluate/reward_tiny output=OUT"],
)  # fmt: skip
def test_an_output_that_cannot_be_written_is_told_before_the_work(tmp_path, monkeypatch, capsys, command):
    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "touch", refuse)
    code = main(command.replace("OUT", f"{tmp_path}/out").split())
    check((code, capsys.readouterr().err), f"{tmp_path}/out", "cannot be written (Read-only file system)")
    assert not list(tmp_path.iterdir())


def test_wrong_keys_in_the_file_come_at_once_with_their_lines(sft):
    text = "policy: nowhere\noutput: out\ndata:\n  trian: rows.jsonl\noptim:\n  learning_rate: fast\n"
    check(sft(text=text), "run.yaml:4", "trian", "run.yaml:6", "fast")


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ('{"prompt": "a", "completion": " b"}\n{"prompt": "a", \n{"prompt": "a", "completion": 7}\n', [":2", ":3", "completion"]),
        ('{"question": "a", "answer": "b"}\n', ["question", "prompt", "columns"]),
        ("", ["0 rows"]),
    ],
)  # fmt: skip
def test_wrong_rows_are_named_all_at_once(sft, tmp_path, rows, parts):
    (tmp_path / "rows.jsonl").write_text(rows)
    check(sft(f"data.train={tmp_path}/rows.jsonl"), f"{tmp_path}/rows.jsonl", *parts)


@pytest.mark.parametrize(
    ("stage", "base"),
    [
        ("sft", "policy: BASE\ndata: {train: good.jsonl, evaluation: [none.jsonl]}"),
        ("reward", "policy: BASE\ndata: {train: [good.jsonl, none.jsonl]}"),
        ("dpo", "policy: BASE\ndata: {train: folder, split: none}"),
        ("ppo", "policy: BASE\nreward_model: BASE\ndata: {train: [{source: none.jsonl}]}"),
        ("online-dpo", "policy: BASE\nreward_model: BASE\ndata: {train: none.jsonl}"),
        ("pretrain", "policy: BASE\ndata: {train: none/*.jsonl}"),
        ("finetune", "policy: BASE\ntask: classification\ndata: {train: none.jsonl}"),
        ("evaluate winrate", "models: {a: BASE}\nbaseline: a\njudge: longer\ndata: {train: none.jsonl}"),
        ("evaluate reward", "reward_model: BASE\ndata: {train: none.jsonl}"),
        ("evaluate language", "model: BASE\ndata: {train: none.jsonl}"),
    ],
)
def test_rows_are_looked_for_before_any_model(stage, base, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("good.jsonl", "folder/train.jsonl"):
        (tmp_path / name).write_text("{}\n")
    for module in ("huggingface_hub.snapshot_download", "huggingface_hub.hf_hub_download"):
        monkeypatch.setattr(module, lambda *_, **__: pytest.fail("a model was asked for"))
    (tmp_path / "run.yaml").write_text(f"{base.replace('BASE', 'owner/base')}\noutput: out\n")
    code = main([*stage.split(), "run.yaml"])
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and "none" in line and "run.yaml:" in line and "owner/base" not in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["~nouser/x", "a" * 5000])
@pytest.mark.parametrize(
    "arguments", ["sft NAME", "sft run.yaml policy=NAME", "sft run.yaml chat_template=NAME", "chat NAME"]
)
def test_a_name_that_no_file_can_have_is_a_mistake_of_the_user(sft, tmp_path, monkeypatch, capsys, name, arguments):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sft("training.max_steps=none")  # writes run.yaml
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    check((main(arguments.replace("NAME", name).split()), capsys.readouterr().err), name[:40])


def test_data_check_advises_its_own_flags(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"question": "a"}\n')
    arguments = ["data", "check", str(tmp_path / "rows.jsonl"), "--kind", "prompts"]
    assert main(arguments) == 2
    assert "Name the file's columns with --columns prompt=question" in capsys.readouterr().err
    assert main([*arguments, "--columns", "prompt=question"]) == 0


@pytest.mark.parametrize(
    ("method", "command"),
    [("grpo", "ppo CONFIG advantages=grpo"), ("rloo", "ppo CONFIG advantages=rloo"), ("kto", "dpo CONFIG loss=kto")],
)
def test_a_method_that_is_no_command_is_told_its_command(capsys, method, command):
    check((main([method, "x"]), capsys.readouterr().err), f"No such command '{method}'", command)


@pytest.mark.parametrize(
    ("command", "way"),
    [("sft base.yaml --lr 3", "optim.learning_rate"), ("ppo base.yaml --kl-coef 3", "kl_coef=VALUE"),
     ("dpo base.yaml --packing", "there is none here"), ("sft base.yaml --blah", "blah=VALUE"),
     ("generate --model x --temperature 1", "temperature=VALUE"), ("evaluate base.yaml", "winrate, judge"),
     ("data rows.jsonl", "check, cache")],
)  # fmt: skip
def test_a_setting_given_as_an_option_is_told_as_key_and_value(capsys, command, way):
    check((main(command.split()), capsys.readouterr().err), way)


def test_the_directory_of_a_run_in_the_place_of_its_model_is_told_so(sft, checkpoints, tmp_path):
    run = tmp_path / "sft"
    shutil.copytree(checkpoints["llama"], run / "model")
    (run / "lineage.json").write_text("{}")
    check(sft(f"policy={run}"), f"{run}: ", f"did you mean {run}/model?")
    assert sft(f"policy={run}/model")[0] == 0


def test_what_is_to_be_installed_is_an_extra_of_this_checkout():
    """PyPI's `alignment` is another project, so that no message may name it with an extra."""
    root = Path(__file__).parents[2]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((root / "alignment").rglob("*.py")))
    extras = (root / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    assert not re.findall(r"alignment\[\w+\]", text)
    advised = set(re.findall(r"install_advice\(['\"]([\w-]+)", text))
    assert {"gguf", "quantization"} <= advised
    assert all(f"\n{extra} = [" in extras for extra in advised)


def test_vocabulary_that_does_not_fit_the_model(sft, broken_model):
    file = broken_model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    size = json.loads((broken_model / "config.json").read_text())["vocab_size"]
    token = {"id": size + 3, "content": "<new>", "single_word": False, "lstrip": False, "rstrip": False}
    tokenizer["added_tokens"].append({**token, "normalized": False, "special": True})
    file.write_text(json.dumps(tokenizer))
    check(sft(f"policy={broken_model}"), str(size), "vocab")


def test_pickled_checkpoint(sft, broken_model):
    (broken_model / "model.safetensors").rename(broken_model / "pytorch_model.bin")
    check(sft(f"policy={broken_model}"), "pytorch_model.bin", "safetensors")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_in_a_checkpoint(sft, broken_model, file):
    config = json.loads((broken_model / file).read_text())
    (broken_model / file).write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.Model"}}))
    check(sft(f"policy={broken_model}"), "auto_map", file)


@pytest.mark.parametrize(
    "override",
    [
        "judge.api_key=open-sesame", "judge.api_key=[open-sesame", "judge.api_key={a: open-sesame}",
        "judge=[{api_key: open-sesame}]", "hub_token open-sesame", "hub_token:open-sesame",
        "optim={api_key: open-sesame, learning_rate: fast}",
    ],
)  # fmt: skip
def test_a_secret_is_not_on_the_screen(sft, override):
    code, message = sft(override, "--debug")
    assert code == 2 and "error: " in message
    assert "open-sesame" not in message


HOSTILE = "\x1b]52;c;aGk=\x07\x1b[2J\x9b2J\x7fa\rb"  # writes the clipboard, clears the screen, goes back in the line


@pytest.mark.parametrize("place", ["row", "key of a row", "key of a config", "template", "stage"])
def test_control_characters_of_strangers_are_shown_as_escapes(place, tmp_path, checkpoints, capsys, monkeypatch):
    """[E7] Wherever a text comes from, no sequence of it reaches the terminal; line breaks and colors do."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    rows, run = tmp_path / "rows.jsonl", tmp_path / "runs" / "one"
    message = {"role": "user", "content": "hello"}
    by_place = {"row": {"prompt": "a", "completion": HOSTILE}, "key of a row": {HOSTILE: "a"}}
    rows.write_text(
        json.dumps(by_place.get(place, {"messages": [message, {**message, "role": "assistant"}] * 2})) + "\n"
    )
    template, config = tmp_path / "t.jinja", tmp_path / "run.yaml"
    raised = f"{{{{ raise_exception({json.dumps(HOSTILE)}) }}}}"
    template.write_text(
        "{% for m in messages %}{% if loop.length > 2 %}" + raised + "{% endif %}{{ m.content }}</s>{% endfor %}"
    )
    config.write_text(f"output: out\n{json.dumps('k' + HOSTILE)}: 1\n")
    run.mkdir(parents=True)
    (run / "lineage.json").write_text(json.dumps({"stage": HOSTILE, "parents": {}}))
    (run / "config.yaml").write_text(f"output: {run}\n")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    check_rows = ["data", "check", str(rows), "--kind", "demonstrations", "--tokenizer", str(checkpoints["llama"])]
    commands = {
        "key of a config": ["sft", str(config)],
        "template": [*check_rows, "--chat-template", str(template)],
        "stage": ["runs", str(run.parent)],
    }
    main(commands.get(place, check_rows))
    shown = "".join(capsys.readouterr())
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", re.sub(r"\x1b\[[\d;]*m", "", shown))
    assert "\\u001b" in shown or "\\x1b" in shown or "\\e" in shown


def test_lines_that_are_written_anew_and_colors_reach_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["--version"]) == 0
    print("\x1b[1mbold\x1b[0m", end="\x1b[K\r")
    assert capsys.readouterr().out.endswith("\x1b[1mbold\x1b[0m\x1b[K\r")


# --- files of the user that a command would write over ---------------------------------------------------------------


def files_below(folder: Path) -> dict[str, bytes]:
    """The content of all files below a folder."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_export_writes_over_nothing_but_an_export(tmp_path, broken_model, monkeypatch, capsys):
    (tmp_path / "thesis" / "deep").mkdir(parents=True)
    (tmp_path / "thesis" / "notes.tex").write_text("a")
    (tmp_path / "thesis" / "deep" / "x.csv").write_text("b")
    (tmp_path / "link").symlink_to("thesis")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    shutil.copytree(broken_model, "copy")  # a model of another's, with the names that an export has too
    for free in ("new/deep", "empty", "edited", "edited", "grown"):  # an earlier export is replaced
        assert main(["export", "--model", str(broken_model), "--output", free]) == 0
    os.utime("edited/config.json", (2**32, 2**32))  # as after a change
    Path("grown/results.json").write_text("{}")
    before = files_below(tmp_path)
    for output in ("thesis", "copy", "model", ".", "link", "thesis/notes.tex", "edited", "grown"):
        check((main(["export", "--model", str(broken_model), "--output", output]), capsys.readouterr().err), "error: ")
    assert files_below(tmp_path) == before
    assert main(["export", "--model", "empty", "--output", "empty"]) == 2  # an export, but what is read


@pytest.mark.parametrize("name", ["config.yaml", "base/weights.bin", "best/notes.txt", "report.html", "samples.jsonl"])
def test_a_stage_does_not_take_the_names_of_other_files(sft, tmp_path, name):
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text("policy: mine")
    check(sft(), str(tmp_path / "out"), name.partition("/")[0])
    assert file.read_text() == "policy: mine"


@pytest.mark.parametrize("name", ["results.json", "responses.jsonl"])
def test_an_evaluation_leaves_results_of_others(name, tmp_path, world, checkpoints, capsys):
    file = tmp_path / name
    file.write_text('{"accuracy": 1}')
    words = ["evaluate", "language", f"model={checkpoints['llama']}", f"data.train={world['pretrain']}"]
    config = tmp_path / "eval.yaml"
    config.write_text(f"output: {tmp_path}\ndata: {{max_rows: 2}}\n")
    check((main([*words[:2], str(config), *words[2:]]), capsys.readouterr().err), name)
    assert file.read_text() == '{"accuracy": 1}'
    file.unlink()
    assert [main([*words[:2], str(config), *words[2:]]) for _ in range(2)] == [0, 0]  # its own are replaced


@pytest.mark.parametrize("name", ["lens.json", "lens.html"])
def test_a_page_and_its_numbers_replace_no_other_file(name, tmp_path, checkpoints, capsys):
    file = tmp_path / name
    file.write_text('[{"prompt": "mine"}]')
    words = ["inspect", "lens", checkpoints["llama"], "--text", "Where", "--output", str(tmp_path / "lens.html")]
    check((main(words), capsys.readouterr().err), name)
    check((main([*words[:-1], str(tmp_path / "x.json")]), capsys.readouterr().err), "x.json")
    assert file.read_text() == '[{"prompt": "mine"}]'
    file.unlink()
    assert [main(words) for _ in range(2)] == [0, 0]


def test_a_report_replaces_no_file_that_is_no_page(tmp_path, stage, capsys):
    (tmp_path / "report.html").write_text("<html>mine</html>")
    words = ["report", str(stage("sft")), "--output", str(tmp_path / "report.html")]
    check((main(words), capsys.readouterr().err), "report.html")
    assert (tmp_path / "report.html").read_text() == "<html>mine</html>"


def test_only_entries_of_the_cache_are_cleared(tmp_path, capsys):
    (tmp_path / "entries" / "chapter1").mkdir(parents=True)
    assert main(["data", "cache", "--clear", "--dir", str(tmp_path)]) == 0
    assert (tmp_path / "entries" / "chapter1").is_dir()


def test_the_hotel_world_replaces_its_own_files_alone(tmp_path):
    sizes = RowCounts(1, 1, 1, 1, 1, 1, 1)
    for _ in range(2):
        write_world(tmp_path / "world", sizes=sizes)
    (tmp_path / "world" / "mine.jsonl").touch()
    with pytest.raises(UserError, match="mine"):
        write_world(tmp_path / "world", sizes=sizes)
