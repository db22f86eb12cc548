"""The tables "What is logged" of docs/methods: they lack no metric that a stage logs, and name none that it cannot log."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from alignment.adapters import LoRASpec
from alignment.algorithms.best_of_n import BestOfNConfig
from alignment.algorithms.best_of_n import run as run_best_of_n
from alignment.algorithms.ppo.config import HeldOutConfig
from alignment.algorithms.pretrain import DistillationConfig, Masked, SentencePairs
from alignment.algorithms.reward_networks import EnsembleConfig
from alignment.data.config import DataConfig
from alignment.data.pretraining.corruption import Masking
from alignment.reports.diagnosis import symptoms_of
from alignment.rewards import LengthSpec, RewardSpec
from alignment.training import TrainingConfig
from alignment.training.loop import ENDED, ENTROPY_LEFT, REPETITION
from tests.conftest import ROOT

PAGES = ROOT / "docs/methods"
LOGGED = ("sft", "reward", "dpo", "ppo", "rloo_grpo", "online_dpo", "adapters", "pretraining", "distillation")
ANSWERS = ["On floor two.", "No idea.", "Where?"]
EXPERTS = {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True}
BERT = {
    "model_type": "bert", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
REWARDS = [RewardSpec(length=LengthSpec(max=1, unit=unit), name=unit) for unit in ("tokens", "characters")]
GROUPS = {"rewards": REWARDS, "advantages": "grpo", "responses_per_prompt": 2}


# The tables


def section(page: str) -> str:
    """The part of a page on what is logged."""
    return (PAGES / f"{page}.md").read_text(encoding="utf-8").partition("## What is logged\n")[2].partition("\n## ")[0]


def rows(page: str) -> Iterator[tuple[list[str], list[str]]]:
    """Names and further cells of each row of a page's table."""
    for line in section(page).splitlines():
        if line.startswith("| `"):
            first, *others = (cell.strip() for cell in line.strip("|").split(" | "))
            yield re.findall(r"`([^`]+)`", first), others


def own_names(page: str) -> list[str]:
    """The metrics that a page's table names; words in capitals stand for any name."""
    return [name for names, _ in rows(page) for name in names]


def all_names(page: str) -> list[str]:
    """The same, with the tables that the section refers to."""
    linked = re.findall(r"\((\w+)\.md#what-is-logged\)", section(page))
    return [name for each in (page, *linked) for name in own_names(each)]


def is_meant(name: str, metric: str) -> bool:
    """True where a table's name stands for a metric."""
    return re.fullmatch(re.sub(r"[A-Z]{2,}", ".+", name), metric) is not None


# Short runs, one for each way to log more


@pytest.fixture(scope="module")
def rows_of(world, tmp_path_factory) -> dict[str, DataConfig]:
    """Rows by kind; of those of the world two sources, each held out too."""
    folder, found = tmp_path_factory.mktemp("rows"), {}
    for kind in ("pretrain", "demonstrations", "comparisons"):
        lines = Path(world[kind]).read_text(encoding="utf-8").splitlines(keepends=True)
        sources = [write(folder / f"{kind}_{start}.jsonl", lines[start::2]) for start in (0, 1)]
        found[kind] = DataConfig(
            train=list(sources), evaluation=list(sources), max_length=48 if kind == "pretrain" else 256
        )
    single = {
        "labels": lambda n: {"prompt": f"The spa {n}?", "completion": ANSWERS[n % 2], "label": n % 2 == 0},
        "rankings": lambda n: {"prompt": f"The spa {n}?", "responses": ANSWERS, "ranking": [0, 1, 2]},
        "steps": lambda n: {"prompt": f"Count to {n}.", "completions": ["one", "five"], "labels": [True, False]},
    }
    for kind, row in single.items():
        path = write(folder / f"{kind}.jsonl", [json.dumps(row(number)) + "\n" for number in range(8)])
        found[kind] = DataConfig(train=path, max_length=256)
    found["prompts"] = DataConfig(train=world["prompts"], max_length=256)
    found["held_out"] = DataConfig(train=world["prompts"], evaluation=world["prompts_eval"], max_length=256)
    return found


def write(path: Path, lines: list[str]) -> str:
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def variants(rows_of, stage, write_checkpoint, tmp_path_factory) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Stage and settings of the runs of each page; together they log all that its stage can."""
    experts = write_checkpoint(tmp_path_factory.mktemp("experts") / "model", "llama", **EXPERTS)
    tuned, judge = str(stage("sft") / "model"), {"reward_model": str(stage("reward") / "model")}

    def kept(metric: str) -> TrainingConfig:
        return TrainingConfig(batch_size=4, max_steps=2, evaluate_every_steps=1, keep_best=metric)

    best = {"training": kept("held_out_loss")}
    text, pairs = {"data": rows_of["pretrain"]} | best, {"data": rows_of["comparisons"]} | best
    demonstrations = {"data": rows_of["demonstrations"]} | best
    encoder = text | {"policy": None, "model": BERT, "vocabulary": 300, "tokenizer_kind": "wordpiece"}
    spans = Masked(masking=Masking(units="spans"), boundary_coef=1.0)
    samples = {"data": rows_of["prompts"], "training": TrainingConfig(batch_size=4, max_steps=1)}
    mix = {
        "pretrain": DataConfig(train=rows_of["pretrain"].train, max_length=64),
        "pretrain_coef": 0.5,
        "pretrain_batch_size": 2,
    }
    held_out = {"data": rows_of["held_out"], "training": kept("held_out_score"), "held_out": HeldOutConfig(**judge)}
    return {
        "sft": [("sft", demonstrations), ("sft", demonstrations | {"policy": experts, "label_smoothing": 0.1})],
        "adapters": [("sft", demonstrations | {"adapter": LoRASpec(rank=2, alpha=4.0)})],
        "reward": [
            ("reward", pairs | {"ensemble": EnsembleConfig(members=2)}),
            ("reward", {"data": rows_of["rankings"], "loss": "ranking"}),
            ("reward", {"data": rows_of["steps"], "loss": "steps"}),
        ],
        "dpo": [("dpo", pairs | {"sft_coef": 0.1}), ("dpo", {"data": rows_of["labels"], "loss": "kto"})],
        "ppo": [
            ("ppo", samples | mix | judge | {"kl_in": "loss", "kl_estimator": "k2", "top_k": 8, "target_kl": 1e-9}),
            ("ppo", held_out | GROUPS | {"advantages": "gae", "value_model": "policy"}),
            ("ppo", samples | mix | GROUPS | {"policy": experts}),
        ],
        "rloo_grpo": [
            ("ppo", samples | GROUPS | {"kl_in": "loss", "kl_estimator": "k3"}),
            ("ppo", samples | GROUPS | {"advantages": "remax"}),
        ],
        "online_dpo": [("online_dpo", samples | {"rewards": REWARDS, "responses_per_prompt": 2, "sft_coef": 0.1})],
        "pretraining": [
            ("pretrain", text),
            ("pretrain", text | {"policy": experts}),
            ("pretrain", text | {"distillation": DistillationConfig(tuned, cosine_coef=1.0)}),
            ("pretrain", encoder | {"objective": spans}),
            ("pretrain", encoder | {"objective": SentencePairs()}),
            ("pretrain", encoder | {"objective": SentencePairs(task="sentence_order")}),
        ],
        "distillation": [("distill", samples | {"teacher": tuned})],
    }  # fmt: skip


@pytest.fixture(scope="module")
def logged(ran, variants, checkpoints, tmp_path_factory, read_metrics) -> Callable[[str], set[str]]:
    """The metrics of all runs of a page, which are made once."""
    done: dict[str, set[str]] = {}

    def metrics(page: str) -> set[str]:
        if page not in done:
            done[page], folder = set(), tmp_path_factory.mktemp(page)
            for number, (kind, changes) in enumerate(variants[page]):
                output = folder / str(number)
                ran(kind, output=output, **{"policy": checkpoints["llama"]} | changes)
                done[page].update(*map(dict.keys, read_metrics(output)))
        return done[page]

    return metrics


@pytest.mark.parametrize("page", LOGGED)
def test_a_stage_logs_no_metric_that_its_page_lacks(page, logged):
    known = all_names(page)
    assert [metric for metric in sorted(logged(page)) if not any(is_meant(name, metric) for name in known)] == []


@pytest.mark.parametrize("page", LOGGED)
def test_a_page_names_no_metric_that_its_stage_cannot_log(page, logged):
    metrics = logged(page)
    assert [name for name in own_names(page) if not any(is_meant(name, metric) for metric in metrics)] == []


def test_the_results_of_best_of_n_are_those_of_its_page(stage, rows_of, tmp_path):
    run_best_of_n(BestOfNConfig(
        str(stage("sft") / "model"), data=rows_of["prompts"], output=str(tmp_path), rewards=REWARDS, responses_per_prompt=2,
        max_new_tokens=8, require_end=False,
    ))  # fmt: skip
    assert set(own_names("best_of_n")) == json.loads((tmp_path / "results.json").read_text(encoding="utf-8")).keys()


# Ranges


@pytest.mark.parametrize(
    ("page", "stage_name", "elsewhere"),
    [
        ("sft", "sft", {"accuracy", "held_out_accuracy"}), ("pretraining", "pretrain", {"accuracy", "held_out_accuracy"}),
        ("reward", "reward", set()), ("dpo", "dpo", set()), ("ppo", "ppo", {"gold_score"}),
    ],
)  # fmt: skip
def test_every_metric_that_the_diagnosis_judges_has_a_healthy_range(page, stage_name, elsewhere):
    ranges = {name: others[-1] for names, others in rows(page) for name in names}
    judged = {name for symptom in symptoms_of(stage_name) for names in symptom.signs for name in names.split()}
    assert {name for name in judged - elsewhere if ranges.get(name, "–") == "–"} == set()


@pytest.mark.parametrize(
    ("metric", "bound"), [("ended_share", ENDED), ("repetition", REPETITION), ("entropy", ENTROPY_LEFT)]
)
def test_bounds_in_the_table_of_ppo_are_those_of_the_alarms(metric, bound):
    [healthy] = [others[-1] for names, others in rows("ppo") if metric in names]
    assert f"{bound:g}" in healthy


@pytest.mark.parametrize("page", [*LOGGED, "best_of_n"])
def test_every_row_has_meaning_unit_and_range(page):
    assert [names for names, others in rows(page) if len(others) != 3 or not all(others)] == []
