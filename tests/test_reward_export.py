"""Exported reward models score as those they were made from: with their scale, and with canaries of their own."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from alignment import load_reward_model
from alignment.adapters import LoRASpec
from alignment.algorithms.reward import EnsembleConfig, NormalizeConfig
from alignment.commands.export import export_model
from alignment.errors import UserError
from alignment.reward_model import member_count
from alignment.reward_model.model import read_canaries
from alignment.training import TrainingConfig
from tests.conftest import write_lines

TEXTS = [("How is the pool?", " Fine."), ("How is the pool?", " I do not know about that."), "A text alone."]
LORA = LoRASpec(rank=4, alpha=16.0)


@pytest.fixture(scope="module")
def train(checkpoints, make_stage, tmp_path_factory):
    """`train(**settings)` -> directory of a reward model after one normalized update."""

    def run_one(**settings) -> str:
        output = tmp_path_factory.mktemp("reward") / "run"
        run, config = make_stage(
            "reward", checkpoints["llama"], output, normalize=NormalizeConfig(samples=8),
            training=TrainingConfig(batch_size=8, max_steps=1), **settings,
        )  # fmt: skip
        return str(run(config))

    return run_one


@pytest.mark.parametrize(
    ("settings", "dtype", "tolerance"),
    [
        ({}, "auto", 0.0),
        ({"adapter": LORA}, "auto", 1e-4),
        ({"adapter": LORA, "ensemble": EnsembleConfig(members=2)}, "auto", 1e-4),
        ({"adapter": LORA}, "bfloat16", 0.3),
    ],
    ids=["whole", "merged", "heads merged", "merged in bfloat16"],
)
def test_an_exported_reward_model_has_the_same_normalized_scores(train, settings, dtype, tolerance, tmp_path):
    source = train(**settings)
    exported = str(export_model(source, None, str(tmp_path / "out"), dtype=dtype))
    before, after = load_reward_model(source), load_reward_model(exported, "auto")
    assert before.calibration.fitted and after.calibration == before.calibration
    assert after.loss == "bradley_terry" and member_count(Path(exported)) == member_count(Path(source))
    assert_close(after.score_members(TEXTS), before.score_members(TEXTS), atol=tolerance, rtol=0)
    saved = read_canaries(Path(exported))
    assert saved is not None and saved.precision == ("half" if dtype == "bfloat16" else "float32")


def test_an_adapter_merged_into_another_base_is_refused(train, checkpoints, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(checkpoints["llama"], base)
    weights = load_file(base / "model.safetensors")
    save_file({name: -tensor for name, tensor in weights.items()}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="head, weights, base model or tokenizer are not those that were trained"):
        export_model(str(base), train(adapter=LORA), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_ensemble_of_adapters_is_exported_by_its_members(train, tmp_path):
    source = train(adapter=LORA, ensemble=EnsembleConfig(members=2, kind="adapters"))
    with pytest.raises(UserError, match=r"ensemble of 2 adapters over one base .* export each member"):
        export_model(source, None, str(tmp_path / "out"))
    whole = load_reward_model(source)
    raw = (whole.score_members(TEXTS) - whole.calibration.bias) / whole.calibration.gain
    for number in range(2):
        member = export_model(f"{source}/member_{number}", None, str(tmp_path / f"member_{number}"))
        assert_close(load_reward_model(str(member)).score(TEXTS), raw[:, number], atol=1e-4, rtol=1e-4)


def without_padding(base: Path, case: str) -> None:
    """Take the padding token's role away in a checkpoint; its place in the vocabulary may have another name."""
    text = (base / "tokenizer.json").read_text()
    names = {"a reserved token": "<|reserved_0|>", "a spare row": "<fill>", "nothing": "<fill>"}
    (base / "tokenizer.json").write_text(text.replace("<pad>", names.get(case, "<pad>")))
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings["pad_token"] = settings["eos_token"] if case == "the end token" else None
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    if case == "a spare row":
        weights = load_file(base / "model.safetensors")
        config = json.loads((base / "config.json").read_text())
        known = config["vocab_size"]
        grown = {name: torch.cat([x, x[:3]]) if len(x) == known else x for name, x in weights.items()}
        save_file(grown, base / "model.safetensors", {"format": "pt"})
        (base / "config.json").write_text(json.dumps(config | {"vocab_size": known + 3}))


@pytest.mark.parametrize(
    ("case", "pad"),
    [("no role", "<pad>"), ("the end token", "<pad>"), ("a reserved token", "<|reserved_0|>"), ("a spare row", "<|pad|>"),
     ("nothing", None)],
)  # fmt: skip
def test_transformers_scores_batches_of_a_reward_model_as_we_do(checkpoints, make_stage, tmp_path, capsys, case, pad):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    base = shutil.copytree(checkpoints["llama"], tmp_path / "base")
    without_padding(base, case)
    run, config = make_stage("reward", str(base), tmp_path / "run", training=TrainingConfig(batch_size=8, max_steps=1))
    directory = str(run(config))
    ours, tokenizer = load_reward_model(directory), AutoTokenizer.from_pretrained(directory)
    assert tokenizer.pad_token == pad
    assert ("no padding token" in capsys.readouterr().err) == (pad is None)
    documents = [
        [*ours.tokenizer(text)["input_ids"], ours.tokenizer.eos_token_id] for text in ("How?", "How is it?", " a")
    ]
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([ids])).logits[:, 0] for ids in documents])
        assert_close(alone, ours.score_ids(documents))
        for side in ("left", "right") if pad else ():
            batch = tokenizer.pad({"input_ids": documents}, return_tensors="pt", padding_side=side)
            assert_close(model(**batch).logits[:, 0], alone)


def test_theta_is_saved_with_the_model(checkpoints, make_stage, tmp_path, world):
    rows = [{"prompt": "How is it?", "responses": [" a", " b", " c"], "ranking": [[0, 1], 2]}] * 8
    write_lines(tmp_path / "rows.jsonl", rows)
    from alignment.data.config import DataConfig

    run, config = make_stage(
        "reward", checkpoints["llama"], tmp_path / "run", loss="rao_kupper", theta=1.5,
        data=DataConfig(train=str(tmp_path / "rows.jsonl")), training=TrainingConfig(batch_size=8, max_steps=2),
    )  # fmt: skip
    directory = run(config)
    found = load_reward_model(str(directory)).calibration
    assert found.theta == 1.5 and not found.fitted
    exported = export_model(str(directory), None, str(tmp_path / "out"))
    assert load_reward_model(str(exported)).calibration == found


# PPO's reward from an ensemble


@pytest.fixture(scope="module")
def opposed(train, tmp_path_factory):
    """An ensemble of two heads of which the second gives the negative of the first's scores."""
    folder = tmp_path_factory.mktemp("opposed") / "model"
    shutil.copytree(train(ensemble=EnsembleConfig(members=2)), folder)
    weights = load_file(folder / "model.safetensors")
    head = torch.stack([weights["score.weight"][0], -weights["score.weight"][0]])
    save_file(weights | {"score.weight": head}, folder / "model.safetensors", {"format": "pt"})
    for name in ("canaries.json", "reward_calibration.json"):
        (folder / name).unlink()
    return str(folder)


def test_ppo_combines_the_scores_of_an_ensemble(opposed, checkpoints, make_stage, tmp_path, read_metrics):
    """Members s and -s: their mean is 0, the least -|s|, and the mean less twice the deviation -2 |s|."""
    first = {}
    for combine, coef in (("mean", 1.0), ("min", 1.0), ("lower", 2.0)):
        run, config = make_stage(
            "ppo", checkpoints["llama"], tmp_path / combine, reward_model=opposed, value_model="policy",
            reward_combine=combine, reward_std_coef=coef, normalize_scores=False,
            training=TrainingConfig(batch_size=8, max_steps=1),
        )  # fmt: skip
        run(config)
        first[combine] = read_metrics(tmp_path / combine)[0]["score"]
    assert first["mean"] == pytest.approx(0, abs=1e-5) and first["min"] < -1e-2
    assert first["lower"] == pytest.approx(2 * first["min"], rel=1e-5)


def test_ppo_refuses_to_combine_a_single_score(train, checkpoints, make_stage, tmp_path):
    run, config = make_stage("ppo", checkpoints["llama"], tmp_path / "ppo", reward_model=train(), reward_combine="min")
    with pytest.raises(UserError, match="reward_combine=min combines the members of an ensemble"):
        run(config)
    with pytest.raises(ValueError, match="reward_std_coef goes with reward_combine=lower"):
        make_stage("ppo", "p", tmp_path, reward_model="r", reward_std_coef=2.0)
