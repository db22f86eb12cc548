"""The page on trouble has every symptom and the messages as they are; the page of other libraries' keys has every key."""

import json
import re
from pathlib import Path

import pytest

from alignment import cli
from alignment.config.load import KEYS_OF_OTHER_LIBRARIES, NEEDLESS, has_key
from alignment.pipeline.stages import STAGES, find_stage
from alignment.reports.diagnosis import OVERFLOW_ADVICE, SYMPTOMS

PAGES = Path(__file__).parents[2] / "docs/run"
ADVICE = {"not finite": OVERFLOW_ADVICE, **{symptom.name: symptom.advice for symptom in SYMPTOMS}}


def sections(page: str) -> dict[str, str]:
    """The text under each heading of the third level."""
    parts = re.split(r"(?m)^### (.+)$", (PAGES / page).read_text(encoding="utf-8"))
    return dict(zip(parts[1::2], parts[2::2], strict=True))


ERRORS = [heading.strip("`") for heading in sections("trouble.md") if heading.startswith("`")]


def test_each_symptom_names_the_settings_that_the_doctor_does():
    found = sections("trouble.md")
    assert {heading for heading in found if not heading.startswith("`")} == ADVICE.keys()
    for name, advice in ADVICE.items():
        named = {key.partition("=")[0] for key in re.findall(r"`([\w.]+(?:=\S+)?)`", found[name])}
        assert {each.key for each in advice} <= named, name


def test_each_number_that_the_page_has_for_a_setting_is_the_doctor_s():
    for name, text in sections("trouble.md").items():
        values = {each.key: each.value for each in ADVICE.get(name, ())}
        for key, value in re.findall(r"`([\w.]+)=(\S+)`", text) if values else []:
            assert str(values[key]) == value, f"{name}: {key}"


PROVOKED = {  # the message -> arguments that lead to it
    "there is no such file, and no packaged one of that name": ["missing.yaml"],
    "unknown key; here it is called": ["run.yaml", "lr=1"],
    "no such file": ["run.yaml", "data.train=missing.jsonl"],
    "Name the file's columns with": ["run.yaml", "data.train=questions.jsonl"],
    "no such model directory": ["run.yaml", "policy=./missing/model"],
    "and the Hub did not give it": ["run.yaml", "policy=missing/model"],
    "messages need a chat template": ["run.yaml", "data.train=messages.jsonl"],
    "too many of the 24 rows do not fit": ["run.yaml", "data.max_length=24"],
    "of a run with other settings": ["run.yaml", "optim.learning_rate=0.1"],
    "--gpus 8: 0 found": ["run.yaml", "--gpus", "8"],
}


def test_ten_errors_are_explained():
    assert list(PROVOKED) == ERRORS and len(ERRORS) == 10


@pytest.mark.parametrize("message", ERRORS)
def test_an_error_reads_as_the_page_says(message, tmp_path, monkeypatch, capsys, checkpoints, world):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for name, row in (
        ("questions", {"question": "a", "answer": "b"}),
        ("messages", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}),
    ):
        Path(f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    Path("run.yaml").write_text(
        f"policy: {checkpoints['llama']}\noutput: run\ndata: {{train: {world['demonstrations']}, max_length: 256}}\n"
        "optim: {learning_rate: 1.0e-3}\ntraining: {max_steps: 1, batch_size: 2}\n"
    )
    if "other settings" in message:
        assert cli.main(["sft", "run.yaml"]) == 0
    assert cli.main(["sft", *PROVOKED[message]]) == 2
    assert message in capsys.readouterr().err


def rows_of_keys() -> list[tuple[str, str]]:
    """(a key of another library, ours) of the page's tables."""
    found = []
    for line in (PAGES / "from_trl.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            theirs, ours = line.split("|")[1:3]
            found += [(key, ours) for key in re.findall(r"`(?:--)?([\w.]+)[^`]*`", theirs)]
    return found


def test_every_translated_key_is_on_the_page():
    shown: dict[str, str] = {}
    for key, ours in rows_of_keys():
        shown[key] = f"{shown.get(key, '')} {ours}"
    for key, ours in KEYS_OF_OTHER_LIBRARIES.items():
        names = {re.split("[ =]", each)[0] for each in ours.split("|")}
        assert names <= set(re.findall(r"`([\w.]+)", shown[key])), key
    assert shown.keys() >= NEEDLESS.keys()


def test_our_keys_on_the_page_are_keys():
    classes = [find_stage(stage)[0] for stage in STAGES]
    for theirs, ours in rows_of_keys():
        for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)[=:`]", ours):
            assert any(has_key(cls, tuple(key.split("."))) for cls in classes), f"{theirs}: {key}"
