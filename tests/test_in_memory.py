"""Stages on rows in memory: the run of the command on the same rows, its model and metrics, and what is refused."""

import math

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
import yaml

import alignment
from alignment.data.rows.read import read_rows
from alignment.errors import UserError
from alignment.pipeline.in_memory import write_lines
from tests.conftest import read_lines

TINY = {"training": {"max_steps": 2, "batch_size": 4}, "optim": {"learning_rate": 1e-3}, "data": {"max_length": 256}}


@pytest.fixture(scope="module")
def rows(world):
    return {kind: read_lines(world[kind]) for kind in ("demonstrations", "comparisons", "prompts")}


def test_sft_gives_the_run_of_the_command(tmp_path, rows, world, checkpoints, make_stage, read_metrics):
    result = alignment.sft(policy=checkpoints["llama"], rows=rows["demonstrations"], output=tmp_path / "run", **TINY)
    assert result.path == tmp_path / "run"
    assert result.metrics == read_metrics(tmp_path / "run") and len(result.metrics) == 2
    from alignment.algorithms import sft
    from alignment.data.config import DataConfig
    from alignment.training import OptimConfig, TrainingConfig

    sft.run(
        sft.SFTConfig(
            policy=checkpoints["llama"], data=DataConfig(train=world["demonstrations"], max_length=256),
            output=str(tmp_path / "command"), training=TrainingConfig(max_steps=2, batch_size=4),
            optim=OptimConfig(learning_rate=1e-3),
        )
    )  # fmt: skip
    same = alignment.load_model(str(tmp_path / "command/model")).state_dict()
    trained = result.model.state_dict()
    assert all(torch.equal(trained[name], same[name]) for name in same)


def test_reward_dpo_and_ppo_follow_each_other(tmp_path, rows, checkpoints):
    policy = checkpoints["llama"]
    judge = alignment.reward(
        policy=policy, rows=datasets.Dataset.from_list(rows["comparisons"]), output=tmp_path / "reward", **TINY
    )
    assert len(judge.model.score(["a guest", "another"])) == 2
    tuned = alignment.dpo(
        policy=policy, rows=iter(rows["comparisons"]), evaluation_rows=rows["comparisons"][:4], output=tmp_path / "dpo",
        loss="ipo", **TINY | {"training": TINY["training"] | {"evaluate_every_steps": 1}},
    )  # fmt: skip
    assert "held_out_loss" in tuned.metrics[-1]
    learner = alignment.ppo(
        policy=policy, rows=rows["prompts"], output=tmp_path / "ppo", reward_model=str(judge.path / "model"),
        max_new_tokens=8, pretrain_coef=0.0, **TINY | {"training": {"max_steps": 1, "batch_size": 4}},
    )  # fmt: skip
    assert "score" in learner.metrics[-1]


def short(completions, **columns):
    return [-float(len(text)) for text in completions]


def test_ppo_takes_functions_as_rewards(tmp_path, rows, checkpoints):
    """Named, local and without a name; a config.yaml holds their names, and another function is another run."""

    def letters(responses):
        return [float(text.count("e")) for text in responses]

    call = {
        "policy": checkpoints["llama"], "rows": rows["prompts"][:4], "max_new_tokens": 4, "advantages": "rloo",
        "responses_per_prompt": 2, **TINY | {"training": {"max_steps": 1, "batch_size": 2}},
    }  # fmt: skip
    run = alignment.ppo(rewards=short, output=tmp_path / "one", **call)
    assert run.metrics[-1]["score/short"] == run.metrics[-1]["score"] <= 0
    several = [
        letters,
        {"function": short, "weight": 0.5},
        {"length": {"max": 2}},
        lambda responses: [1.0, 2.0, 3.0, 4.0],
    ]
    held_out = {"held_out": {"rewards": letters}, "evaluation_rows": rows["prompts"][4:6]}
    metrics = alignment.ppo(rewards=several, output=tmp_path / "several", **held_out, **call).metrics[-1]
    wanted = metrics["score/letters"] + 0.5 * metrics["score/short"] + metrics["score/length"] + 2.5
    assert metrics["score"] == pytest.approx(wanted, abs=1e-5)
    config = yaml.safe_load((tmp_path / "one/config.yaml").read_text())
    assert config["rewards"][0]["function"] == f"{__name__}:short"
    with pytest.raises(UserError, match="rewards"):
        alignment.ppo(rewards=[letters], output=tmp_path / "one", **call)
    with pytest.raises(UserError, match="two functions are named"):
        alignment.ppo(rewards=[(lambda responses, i=i: [i]) for i in range(2)], output=tmp_path / "two", **call)


def test_each_update_is_handed_to_a_function_as_it_comes(tmp_path, rows, checkpoints):
    """An exception ends the run, and runs after it have nothing to do with the function."""
    lines = []
    call = {"policy": checkpoints["llama"], "rows": rows["demonstrations"], "on_update": lines.append, **TINY}
    result = alignment.sft(output=tmp_path / "run", **call)
    assert lines == result.metrics and [line["step"] for line in lines] == [1, 2]

    def stop(line):
        raise InterruptedError(f"after {line['step']}")

    with pytest.raises(InterruptedError, match="after 1"):
        alignment.sft(output=tmp_path / "stopped", **{**call, "on_update": stop})
    alignment.sft(output=tmp_path / "other", **{**call, "on_update": None})
    assert len(lines) == 2


def test_iterations_of_online_dpo_are_handed_over_and_compared(tmp_path, rows, checkpoints):
    base, lines = checkpoints["llama"], []
    learner = alignment.online_dpo(
        policy=base, rows=rows["prompts"], output=tmp_path / "online", on_update=lines.append,
        judge="tests.test_in_memory:more_letters", max_new_tokens=8, **TINY,
    )  # fmt: skip
    assert len(lines) == 2 and lines == learner.metrics
    compared = alignment.evaluate(
        models={"base": base, "tuned": str(learner.path / "model")}, baseline="base", judge="longer",
        rows=rows["prompts"][:6], output=tmp_path / "winrate", max_new_tokens=8,
    )  # fmt: skip
    assert compared.results["models"]["tuned"]["win_rate"]["n"] == 6 and compared.metrics == []
    with pytest.raises(UserError, match="evaluation_rows"):
        alignment.evaluate(models={}, baseline="a", rows=[], evaluation_rows=[], output=tmp_path / "winrate")
    assert alignment.evaluate.__doc__ and "PPO" in alignment.ppo.__doc__ and alignment.ppo.__name__ == "ppo"


def more_letters(prompts, first, second):
    return [float(len(one) > len(other)) for one, other in zip(first, second, strict=True)]


def test_best_of_n_writes_rows_that_sft_takes(tmp_path, rows, checkpoints):
    chosen = alignment.best_of_n(
        policy=checkpoints["llama"], rows=rows["prompts"][:4], output=tmp_path / "best", require_end=False,
        rewards=[{"function": "tests.test_in_memory:letters"}], responses_per_prompt=2, max_new_tokens=8,
    )  # fmt: skip
    written = read_lines(chosen.path / "demonstrations.jsonl")
    assert len(written) == 4 and chosen.results["prompts"] == 4


def letters(prompts, responses):
    return [float(len(response)) for response in responses]


def test_pretraining_and_fine_tuning_give_models_that_are_used_at_once(tmp_path, rows, checkpoints):
    texts = [{"text": f"{row['prompt']} {row['completion']}"} for row in rows["demonstrations"]]
    model = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    tiny = {**TINY, "data": {"max_length": 64}}
    base = alignment.pretrain(rows=texts, output=tmp_path / "base", model=model, tokenizer=checkpoints["llama"], **tiny)
    assert base.model(torch.tensor([[5, 6, 7]])).logits.shape[:2] == (1, 3)
    labeled = [{"text": text["text"], "label": ["short", "long"][number % 2]} for number, text in enumerate(texts)]
    tuned = alignment.finetune(
        policy=str(base.path / "model"), task="classification", rows=labeled, output=tmp_path / "tuned", **tiny
    )
    assert tuned.model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 2)


def test_rows_of_pandas_numpy_and_datasets_are_those_of_the_same_lists(tmp_path, capsys):
    """[C19] pandas gives arrays and NaN; Arrow gives each object the keys of all others (null), which nobody wrote."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    other = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "g", "arguments": {"b": "2"}}}]}
    wanted = [{"messages": [{"role": "user", "content": "q"}, each]} for each in (call, other)]
    held = datasets.Dataset.from_list(wanted)
    held.to_parquet(str(tmp_path / "rows.parquet"))
    frame = pd.read_parquet(tmp_path / "rows.parquet")
    given = wanted, held, frame, frame.to_dict("records")
    read = [read_rows(write_lines(rows, tmp_path, "train"), "demonstrations")[0] for rows in given]
    read.append(read_rows(tmp_path / "rows.parquet", "demonstrations")[0])
    assert [[record.messages for record in records] for records in read] == [
        [record.messages for record in read[0]]
    ] * 5
    assert read[0][1].messages[1]["tool_calls"][0]["function"]["arguments"] == {"b": "2"}
    numbers = [
        {"margin": np.float32(2), "label": np.bool_(True), "k": np.arange(2)},
        {"margin": math.nan, "label": False},
    ]
    lines = read_lines(write_lines(numbers, tmp_path, "train"))
    assert lines == [{"margin": 2.0, "label": True, "k": [0, 1]}, {"margin": None, "label": False}]
    assert "{'margin': 1}" in capsys.readouterr().err
    with pytest.raises(UserError, match="train: row 1: Out of range"):
        write_lines([{"k": [math.nan]}], tmp_path, "train")


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([], {}, "train: there are no rows"),
        ("rows.jsonl", {}, "got str; rows are a list of mappings"),
        ([{"prompt": "a", "completion": "b"}, ["c"]], {}, "train: row 2: a row is a mapping of columns, got list"),
        ([{"prompt": "a", "completion": {1, 2}}], {}, "train: row 1: .* set is not JSON serializable"),
        ([{"prompt": "a", "completion": float("inf")}], {}, "train: row 1: "),
        ([{"prompt": "a"}], {"optim": {"learning_rat": 1.0}}, r"sft\(\.\.\.\): optim.learning_rat"),
        ([{"prompt": "a"}], {"data": {"train": "x.jsonl"}}, "data.train: rows are given too"),
        ([{"prompt": "a"}], {"data": "x.jsonl"}, "data: give its settings as a mapping"),
    ],
)
def test_wrong_calls_end_in_one_message(tmp_path, rows, changes, message):
    with pytest.raises(UserError, match=message):
        alignment.sft(policy=str(tmp_path), rows=rows, output=tmp_path / "run", **changes)
    assert not list(tmp_path.rglob("metrics.jsonl"))
