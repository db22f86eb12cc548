"""Draws docs/pictures/overoptimization.svg: true reward and reward-model score over KL, of finished runs of the recipe.

alignment run overoptimization --output runs/overoptimization-0
alignment run overoptimization seed=1 --output runs/overoptimization-1
alignment run overoptimization seed=2 --output runs/overoptimization-2
python scripts/docs_overoptimization.py runs/overoptimization-0 runs/overoptimization-1 runs/overoptimization-2
"""

import json
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from alignment.reports.charts import MUTED, SERIES, STYLE, inline_svg

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "overoptimization.svg"
LABEL = (
    "Two charts over the KL from the SFT policy, three seeds each. Above, the true reward rises, peaks and falls. "
    "Below, the score of the reward model goes on rising."
)
WIDTH, HEIGHT = 400, 440  # about the CSS pixels of a telephone, so that letters stay readable there
STYLE_SHEET = """<style>
svg { --ink: #1d1c1a; --muted: #67635b; --grid: #e4e0d7; --series-0: #0072b2; --series-1: #d55e00; --series-2: #00805e; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #ebe8e1; --muted: #b5b0a6; --grid: #34373d; --series-0: #56a8e2; --series-1: #f2894a; --series-2: #3cc497; }
  #card { fill: #1d1f23; }
}
text { font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", Arial, sans-serif; }
</style><rect id="card" width="100%" height="100%" rx="8" fill="#ffffff"/>"""


def draw(axes: Axes, paths: list[list[dict[str, float]]], quantity: str) -> None:
    """Each seed's path from the SFT policy on; a ring marks its highest value."""
    for seed, points in enumerate(paths):
        x, y = [point["kl"] for point in points], [point[quantity] for point in points]
        best = max(range(len(y)), key=y.__getitem__)
        axes.plot(x, y, color=SERIES[seed], label=f"seed {seed}", linewidth=2.0)
        axes.plot(x[best], y[best], color=SERIES[seed], marker="o", markersize=9, markerfacecolor="none")
    axes.set_xlim(0, 9.5)


@mpl.rc_context({**STYLE, "font.size": 12, "axes.labelsize": 12, "xtick.labelsize": 12, "ytick.labelsize": 12})
def picture(paths: list[list[dict[str, float]]]) -> str:
    """The two charts, one above the other on a card of its own, as a whole SVG file."""
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="constrained", facecolor="none")
    above, below = figure.subplots(2, 1, sharex=True)
    for axes, quantity, title in ((above, "gold", "true reward"), (below, "proxy", "score of the reward model")):
        axes.set_facecolor("none")
        draw(axes, paths, quantity)
        axes.set_title(title, loc="left", fontsize=13, fontweight="bold")
    above.legend(frameon=False, loc="lower right", fontsize=12, labelcolor=MUTED)
    below.set_xlabel("KL from the SFT policy, nats")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # pyright: ignore[reportOptionalMemberAccess]
    svg = str(inline_svg(figure, LABEL))
    opening, rest = svg.split(">", 1)
    return f'{opening} xmlns="http://www.w3.org/2000/svg" width="560">{STYLE_SHEET}{rest}'


def main() -> None:
    runs = [json.loads((Path(run) / "study" / "results.json").read_text("utf-8")) for run in sys.argv[1:]]
    PICTURE.write_text(picture([run["series"]["PPO"] for run in runs]), "utf-8")


if __name__ == "__main__":
    main()
