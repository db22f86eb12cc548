"""The measured curves of docs/methods, as SVG for light and dark pages: `python scripts/docs_curves.py RUNS [RUNS ...]`.

A folder of RUNS holds runs of recipes by name and seed, `methods-0`, `details-1`; the first folder that has one counts.
online_dpo-SEED and adapters-SEED are no recipes: the pages have their commands. Of smollm2 any one seed will do.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

SEEDS = (0, 1, 2)
GRAY = "#808080"  # as readable on white as on dark slate
COLORS = ("#2f7fd6", "#d9722e", "#2a9d6f", "#b35cb3", "#c0392b", "#8a7a2a")
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "alignment", "font.family": "sans-serif", "font.size": 10,
    "text.color": GRAY, "axes.labelcolor": GRAY, "axes.edgecolor": GRAY, "xtick.color": GRAY, "ytick.color": GRAY,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10, "axes.titlecolor": GRAY,
    "grid.color": GRAY, "grid.alpha": 0.25, "axes.grid": True, "legend.frameon": False, "legend.labelcolor": GRAY,
    "lines.linewidth": 1.6, "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
}  # fmt: skip

Values = NDArray[np.float64]
Runs = Callable[[str], list[Path]]  # "methods/sft" -> that stage's directory of each seed


def finder(folders: Sequence[Path]) -> Runs:
    """A function that finds a stage's directories, one for each seed."""

    def find(stage: str) -> list[Path]:
        recipe, _, name = stage.partition("/")
        found = [next((p for f in folders if (p := f / f"{recipe}-{seed}" / name).is_dir()), None) for seed in SEEDS]
        missing = [seed for seed, path in zip(SEEDS, found, strict=True) if path is None]
        if missing and (recipe != "smollm2" or len(missing) == len(SEEDS)):
            raise SystemExit(f"{stage}: no run of seed {missing[0]} in {', '.join(map(str, folders))}")
        return [path for path in found if path is not None]

    return find


def column(run: Path, metric: str) -> tuple[Values, Values]:
    """Steps and values of a metric, where it was logged."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    pairs = [(line["step"], line[metric]) for line in lines if metric in line]
    return np.array([step for step, _ in pairs], float), np.array([value for _, value in pairs], float)


def smooth(values: Values, width: int) -> Values:
    """Mean of `width` values up to each one, of as many as there are at the beginning."""
    return np.array([values[max(0, end - width) : end].mean() for end in range(1, len(values) + 1)])


def mean_of_seeds(runs: Sequence[Path], metric: str, width: int) -> tuple[Values, Values]:
    """Steps, as many as the shortest run has, and the smoothed mean over the seeds."""
    columns = [column(run, metric) for run in runs]
    length = min(len(values) for _, values in columns)
    return columns[0][0][:length], smooth(np.mean([values[:length] for _, values in columns], axis=0), width)


def each_seed(axes: Axes, runs: Sequence[Path], metric: str, width: int, line: str = "-", name: str = "seed") -> None:
    """One line for each seed."""
    for seed, (run, color) in enumerate(zip(runs, COLORS, strict=False)):
        steps, values = column(run, metric)
        axes.plot(steps, smooth(values, width), line, color=color, label=name and f"{name} {seed}")


def end_dots(axes: Axes, runs: Sequence[Path], metric: str) -> None:
    """The last value of a metric as a dot for each seed."""
    for run, color in zip(runs, COLORS, strict=False):
        steps, values = column(run, metric)
        axes.plot(steps[-1], values[-1], "o", color=color, markersize=5, clip_on=False)


def panels(*titles: str, x: str) -> tuple[Figure, Sequence[Axes]]:
    """A figure with an axes for each title."""
    width = {1: 6.4, 2: 7.4}.get(len(titles), 9.6)
    figure = Figure(figsize=(width, 3.1), layout="constrained")
    row = [figure.add_subplot(1, len(titles), number) for number in range(1, len(titles) + 1)]
    for axes, title in zip(row, titles, strict=True):
        axes.set_title(title, loc="left")
        axes.set_xlabel(x)
    return figure, row


def sft(find: Runs) -> Figure:
    figure, [axes] = panels("training loss, nats per token", x="update")
    each_seed(axes, find("methods/sft"), "loss", 10)
    axes.axvline(78.5, color=GRAY, linestyle="--", linewidth=1)
    axes.legend()
    return figure


def reward(find: Runs) -> Figure:
    figure, [axes] = panels("accuracy of pairs; dots: held out", x="update")
    each_seed(axes, find("methods/reward"), "accuracy", 25)
    end_dots(axes, find("methods/reward"), "held_out_accuracy")
    axes.legend(loc="lower right")
    return figure


def dpo(find: Runs) -> Figure:
    figure, [axes] = panels("change of log-probability, nats; chosen solid, rejected dashed", x="update")
    for beta, color in zip(("1", "0.3", "0.1", "0.03"), COLORS, strict=False):
        runs = find(f"overoptimization/dpo_{beta.replace('.', '_')}")
        axes.plot(*mean_of_seeds(runs, "chosen_log_prob_change", 5), color=color, label=f"beta {beta}")
        axes.plot(*mean_of_seeds(runs, "rejected_log_prob_change", 5), "--", color=color)
    axes.legend(loc="lower left")
    return figure


def ppo(find: Runs) -> Figure:
    figure, [kl, gold] = panels("KL from the reference, nats", "true reward", x="iteration")
    for axes, metric in ((kl, "kl"), (gold, "gold_score")):
        each_seed(axes, find("details/ppo"), metric, 3, name="with penalty, seed")
        each_seed(axes, find("details/no_kl"), metric, 3, "--", name="without, seed")
    kl.legend(fontsize=8)
    return figure


def rloo_grpo(find: Runs) -> Figure:
    names = {
        "PPO": "ppo",
        "RLOO": "rloo",
        "REINFORCE++": "reinforce",
        "ReMax": "remax",
        "GRPO": "grpo",
        "Dr. GRPO": "dr_grpo",
    }
    figure, [gold, kl] = panels("true reward", "KL from the reference, nats", x="iteration")
    for axes, metric in ((gold, "gold_score"), (kl, "kl")):
        for (name, stage), color in zip(names.items(), COLORS, strict=True):
            axes.plot(*mean_of_seeds(find(f"methods/{stage}"), metric, 5), color=color, label=name)
    gold.legend(fontsize=8, ncols=2, loc="lower right")
    return figure


def online_dpo(find: Runs) -> Figure:
    figure, [score, gold] = panels("score of the reward model", "true reward", x="iteration")
    for axes, metric in ((score, "score"), (gold, "gold_score")):
        each_seed(axes, find("online_dpo/online_dpo"), metric, 5)
    score.legend(loc="lower right")
    return figure


def best_of_n(find: Runs) -> Figure:
    figure, [axes] = panels("true reward solid, score of the reward model dashed", x="n")
    for seed, (run, color) in enumerate(zip(find("overoptimization/best_of_n"), COLORS, strict=False)):
        curve = json.loads((run / "card.json").read_text(encoding="utf-8"))["best_of_n"]["curve"]
        sizes = [point["n"] for point in curve]
        axes.plot(sizes, [point["gold"] for point in curve], "o-", markersize=4, color=color, label=f"seed {seed}")
        axes.plot(sizes, [point["proxy"] for point in curve], "--", color=color)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.legend(loc="lower right")
    return figure


def adapters(find: Runs) -> Figure:
    names = {"all weights": "full", "LoRA, rank 64": "lora_64", "rank 8": "lora_8", "rank 1": "lora_1"}
    figure, [axes] = panels("held-out loss, nats per token", x="update")
    for (name, stage), color in zip(names.items(), COLORS, strict=False):
        axes.plot(
            *mean_of_seeds(find(f"adapters/{stage}"), "held_out_loss", 1), "o-", markersize=3, color=color, label=name
        )
    axes.legend()
    return figure


def pretraining(find: Runs) -> Figure:
    figure, [axes] = panels("loss, nats per token; dots: held out", x="update")
    each_seed(axes, find("methods/pretrain"), "loss", 1)
    end_dots(axes, find("methods/pretrain"), "held_out_loss")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, ticks in ((axes.xaxis, (1, 10, 100, 400)), (axes.yaxis, (0.5, 1, 2, 4, 8))):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
    axes.legend()
    return figure


def distillation(find: Runs) -> Figure:
    figure, [kl, gold] = panels("reverse KL, nats per token", "true reward", x="iteration")
    for axes, metric in ((kl, "reverse_kl"), (gold, "gold_score")):
        each_seed(axes, find("distillation/on_policy"), metric, 5)
        each_seed(axes, find("distillation/on_policy_16"), metric, 5, "--", name="")
    kl.legend(loc="upper right")
    return figure


def real_model(find: Runs) -> Figure:
    figure, [accuracy, margin, score] = panels(
        "reward model: accuracy", "DPO: margin, beta nats", "PPO: score and KL, nats", x="update, or iteration"
    )
    for axes, stage, metric in ((accuracy, "reward", "accuracy"), (margin, "dpo", "margin")):
        steps, values = column(find(f"smollm2/{stage}")[0], metric)
        axes.plot(steps, smooth(values, 10), color=COLORS[0])
    for (name, stage), color in zip(
        {"with the mix": "ppo", "without": "ppo_without_mix"}.items(), COLORS, strict=False
    ):
        run = find(f"smollm2/{stage}")[0]
        score.plot(*column(run, "score"), color=color, label=name)
        score.plot(*column(run, "kl"), "--", color=color)
    score.legend(fontsize=8)
    return figure


CURVES: Mapping[str, Callable[[Runs], Figure]] = {
    each.__name__: each
    for each in (
        sft,
        reward,
        dpo,
        ppo,
        rloo_grpo,
        online_dpo,
        best_of_n,
        adapters,
        pretraining,
        distillation,
        real_model,
    )
}


def main() -> None:
    """Write all pictures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "docs/pictures")
    parser.add_argument("--only", nargs="+", choices=CURVES, default=list(CURVES))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for name in arguments.only:
            path = arguments.output / f"{name}.svg"
            CURVES[name](finder(arguments.runs)).savefig(path, metadata={"Date": None})
            print(path)


if __name__ == "__main__":
    main()
