"""The card of a model: what it says is what the run's files say, a user's edit stays, and the model is the same."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

import alignment
from alignment.files import CARD
from alignment.pipeline.stages import write_card_of
from alignment.reports import model_card
from alignment.reports.model_card import card_text, shortened
from alignment.training.run.lineage import directory_hash
from tests.conftest import read_lines, write_lines


@pytest.fixture
def run(stage, tmp_path) -> Path:
    """A copy of a DPO run."""
    return Path(shutil.copytree(stage("dpo"), tmp_path / "polite"))


def settings_of(run: Path, **changes) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | changes))
    if "policy" in changes:
        digest = "0" * (64 if Path(changes["policy"]).is_dir() else 40)
        lineage = json.loads((run / "lineage.json").read_text()) | {"parents": {changes["policy"]: digest}}
        (run / "lineage.json").write_text(json.dumps(lineage))


def test_the_card_says_what_the_run_has_recorded(run, stage, world):
    write_card_of(run)
    card, lineage = ModelCard.load(run / "model" / CARD), json.loads((run / "lineage.json").read_text())
    assert card.data.to_dict() == {"library_name": "transformers", "tags": ["alignment", "dpo"]}
    last = read_lines(run / "metrics.jsonl")[-1]
    rows = len(read_lines(world["comparisons"]))
    for text in (
        "# polite",
        f"in {lineage['finished']} updates",
        lineage["data"]["data.train"],
        f"{rows} of {rows} rows kept",
        "| `optim.learning_rate` | 0.003 |",
        f"| `loss` | {last['loss']:#.3g} | {last['step']} |",
        next(iter(lineage["parents"].values())),  # SFT, and what SFT began from
        next(iter(json.loads((stage("sft") / "lineage.json").read_text())["parents"].values())),
        f"torch {lineage['code']['versions']['torch']}",
        "model = AutoModelForCausalLM.from_pretrained(name)",
    ):
        assert text in card.text, text
    assert "`beta`" not in card.text  # the default


def test_the_card_shows_no_directories_of_this_machine(run, stage):
    card = card_text(run)
    assert str(stage("sft").parent) not in card and "sft/model" in card
    assert shortened("x (see /home/me/rows/train.jsonl:3) at https://host/a/b/c") == (
        "x (see rows/train.jsonl:3) at https://host/a/b/c"
    )


@pytest.mark.parametrize("name", ["dpo", "sft lora", "reward"])
def test_the_code_of_the_card_opens_the_model(stage, tmp_path, name):
    run = Path(shutil.copytree(stage(name), tmp_path / "run"))
    write_card_of(run)
    code = (run / "model" / CARD).read_text().split("```")[1].removeprefix("python\n")
    variables: dict = {}
    exec(code.replace("NAME", str(run / "model")), variables)
    assert sum(parameter.numel() for parameter in variables["model"].parameters()) > 10_000
    assert len(variables["tokenizer"]("a word").input_ids) > 0


def test_base_license_and_data_sets_of_the_hub_are_named(run, tmp_path, monkeypatch):
    cached = {}
    for kind, name, license in (("model", "owner/base", "mit"), ("dataset", "owner/pairs", "mit")):
        cached[name, kind] = tmp_path / f"{kind}.md"
        cached[name, kind].write_text(f"---\nlicense: {license}\n---\n")
    find = lambda name, file, repo_type: str(cached[name, repo_type])  # noqa: E731
    monkeypatch.setattr(model_card, "try_to_load_from_cache", find)
    settings_of(run, policy="owner/base", data={"train": ["owner/pairs[test]", "rows.jsonl"]}, adapter={"kind": "lora"})
    data = ModelCard(card_text(run)).data
    assert (data.base_model, data.license, data.datasets) == ("owner/base", "mit", ["owner/pairs"])
    assert data.tags == ["alignment", "dpo", "lora"]
    cached["owner/pairs", "dataset"].write_text("---\nlicense: cc-by-4.0\n---\n")
    assert ModelCard(card_text(run)).data.license is None and "cc-by-4.0, mit" in card_text(run)
    cached["owner/pairs", "dataset"].write_text("---\nlicense: [\n---\n")  # damaged, and not ours
    assert ModelCard(card_text(run)).data.license == "mit"


def test_two_runs_that_took_turns_are_no_endless_chain(run, tmp_path):
    other = Path(shutil.copytree(run, tmp_path / "other"))
    settings_of(run, policy=str(other / "model"))
    settings_of(other, policy=str(run / "model"))
    assert card_text(run).count("other/model") == 3  # in the first line, the settings and the lineage


def test_nothing_is_asked_of_the_hub(run, monkeypatch):
    settings_of(run, policy="owner/absent")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
    assert ModelCard(card_text(run)).data.base_model == "owner/absent"


def test_the_win_rate_of_an_evaluation_beside_the_run_is_named(run):
    rate = {"rate": 0.625, "low": 0.5, "high": 0.75}
    folder = run.parent / "winrate"
    folder.mkdir()
    results = {"judge": "gold", "baseline": "SFT", "prompts": 40, "models": {"SFT": {}, "mine": {"win_rate": rate}}}
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "sampling.json").write_text(json.dumps({"models": {"mine": directory_hash(run / "model"), "SFT": "0"}}))
    assert "Preferred to SFT on 40 prompts by the judge `gold`: 62.5 % [50.0, 75.0]." in card_text(run)
    seeds = {"mine": {"win_rate": rate | {"seeds": 3}}}
    (folder / "results.json").write_text(json.dumps(results | {"models": seeds}))
    own = {"mine, seed 2": directory_hash(run / "model")}
    (folder / "sampling.json").write_text(json.dumps({"models": own}))
    assert "by the judge `gold`, over 3 seeds of the training: 62.5 % [50.0, 75.0]." in card_text(run)
    (folder / "sampling.json").write_text(json.dumps({"models": {"mine": "0", "SFT": "0"}}))  # another model by now
    assert "Preferred" not in card_text(run)


def test_an_edited_card_stays_and_an_own_one_is_written_again(run):
    path = run / "model" / CARD
    path.write_text("Mine.\n")
    write_card_of(run)
    assert path.read_text() == "Mine.\n"
    path.unlink()
    write_card_of(run)
    whole = path.read_text()
    path.write_text(whole.replace("# polite", "# Polite"))
    write_card_of(run)
    assert path.read_text() == whole.replace("# polite", "# Polite")
    path.write_text(whole)
    settings_of(run, beta=7.0)
    write_card_of(run)
    assert "| `beta` | 7.0 |" in path.read_text()


def test_a_card_is_no_part_of_the_model(run):
    before = directory_hash(run / "model")
    write_card_of(run)
    assert directory_hash(run / "model") == before


def test_a_longer_run_keeps_the_card_that_a_user_edited(world, checkpoints, tmp_path):
    rows = read_lines(world["demonstrations"])[:16]
    settings = {"policy": checkpoints["llama"], "rows": rows, "output": tmp_path / "run"}
    training = {"batch_size": 8, "save_every_steps": 1, "max_steps": 1}
    alignment.sft(**settings, training=training)
    path = tmp_path / "run" / "model" / CARD
    assert "in 1 update." in path.read_text()
    alignment.sft(**settings, training=training | {"max_steps": 2})
    assert "in 2 updates." in path.read_text()
    path.write_text("Mine.\n")
    alignment.sft(**settings, training=training | {"max_steps": 3})
    assert path.read_text() == "Mine.\n"
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 3


def test_the_card_is_of_the_weights_that_the_model_has(run):
    lines = read_lines(run / "metrics.jsonl")
    lines[-1] |= {"best_step": lines[-2]["step"], "loss": 77.0}
    write_lines(run / "metrics.jsonl", lines)
    assert f"| {lines[-2]['step']} |" in card_text(run) and "77" not in card_text(run).split("## Results")[1][:400]
