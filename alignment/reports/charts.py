"""Charts as inline SVG in the page's own colors, light or dark."""

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from alignment.reports.html import Chart
from alignment.reports.run_log import window_sums

# Placeholder colors for matplotlib; the SVG refers to the page's style sheet instead.
INK = "#a00000"
MUTED = "#a00001"
GRID = "#a00002"
SERIES = tuple(f"#a000{shade:02x}" for shade in range(0x10, 0x1A))
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid"} | {color: f"series-{i}" for i, color in enumerate(SERIES)}
REPLACED = (  # in matplotlib's SVG
    (r"(?s)^.*?(?=<svg)", ""),
    (r"(?s)<metadata>.*?</metadata>|<style.*?</style>", ""),
    (r' xmlns(:\w+)?="[^"]*"| (width|height)="[\d.]+pt"| version="1.1"', ""),
    (r'<g id="[^"]*"', "<g"),
    (r' transform="rotate\(-?0 [^"]*"', ""),
    (r">\s+<", "><"),
    ("xlink:href", "href"),
    (r"font-family: [^;\"]+;? ?", ""),  # the style sheet names the typeface
    (r"font: ((?:\w+ )?[\d.]+px) [^;\"]+", r"font: \1 var(--sans)"),  # as older versions write it
    *((color, f"var(--{name})") for color, name in VARIABLES.items()),
)

WIDTH = 330  # in units that are CSS pixels at full size, so that letters stay readable in a narrow window
POINTS_SHOWN = 160  # per curve
LABEL_LETTERS = 18  # of a bar's label on one line

STYLE: Any = {
    "svg.fonttype": "none",  # letters stay letters: searchable, and in the page's own typeface
    "text.parse_math": False,  # a "$" in a name is a "$"
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.limits": (-3, 5),
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.bottom": False,
    "ytick.left": False,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}
# of a bar's value: beside the chart, where neither a line nor a label is
BESIDE: Any = {"xycoords": ("axes fraction", "data"), "xytext": (6, 0), "textcoords": "offset points"}


class Curve(NamedTuple):
    """One line: label, coordinates, the number of its color, and dashes where it is the second of this color."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    dashed: bool = False


class Bar(NamedTuple):
    """One bar: label, value, the interval around it if there is one, and the number of its color."""

    label: str
    value: float
    interval: tuple[float, float] | None = None
    color: int = 0


@lru_cache(maxsize=512)
@mpl.rc_context(STYLE)
def curve_chart(label: str, curves: tuple[Curve, ...], x_label: str) -> Markup:
    """Noisy measurements over time, drawn once: raw line pale, moving average strong. Coordinates must be tuples."""
    # Fixed margins: pages have hundreds of these charts, and fitting margins to letters takes half of the time.
    figure = Figure(figsize=(WIDTH / 72, 188 / 72), facecolor="none")
    axes = figure.add_axes((46 / WIDTH, 34 / 188, (WIDTH - 56) / WIDTH, 146 / 188), facecolor="none")
    for curve in curves:
        x = np.asarray(curve.x, float)
        y = np.asarray(curve.y, float)
        form: Any = {"color": SERIES[curve.color % len(SERIES)], "linestyle": (0, (3, 2)) if curve.dashed else "-"}
        # neighbors on a line, as in a schedule: averaging would only bend it
        if len(y) < 40 or np.median(np.abs(np.diff(y, 2))) <= 0.01 * np.ptp(y):
            axes.plot(_thin(x), _thin(y), **form, marker="o" if len(y) < 25 else "", markersize=3)
        else:
            axes.plot(_thin(x), _thin(y), **form, linewidth=0.9, alpha=0.35 if len(curves) < 3 else 0.15)
            axes.plot(_thin(x), _thin(_moving_average(y, len(y) // 12)), **form)
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.margins(x=0.02, y=0.08)
    return label_list(curves) + inline_svg(figure, label, _courses(curves))


@mpl.rc_context(STYLE)
def path_chart(label: str, curves: Sequence[Curve], x_label: str, y_label: str, *, noisy: bool = False) -> Markup:
    """Paths through a plane; of noisy points the moving average, from a ring to a large dot."""
    figure, axes = empty_figure(250)
    for curve in curves:
        color = SERIES[curve.color % len(SERIES)]
        x = _thin(np.asarray(curve.x, float))
        y = _thin(np.asarray(curve.y, float))
        if noisy:
            axes.plot(x, y, color=color, linestyle="", marker="o", markersize=2.6, markeredgewidth=0, alpha=0.4)
            x, y = (_moving_average(values, max(len(values) // 4, 1)) for values in (x, y))
            axes.plot(x[0], y[0], color=color, marker="o", markersize=7.5, markerfacecolor="none")
        axes.plot(x, y, color=color, linewidth=1.2, marker="" if noisy else "o", markersize=2.6, alpha=0.75)
        axes.plot(x[-1], y[-1], color=color, marker="o", markersize=7.5, markeredgewidth=0)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.margins(0.06)
    return label_list(curves) + inline_svg(figure, label, _courses(curves))


@mpl.rc_context(STYLE)
def bar_chart(
    label: str, bars: Sequence[Bar], *, limits: tuple[float, float], percent: bool = False, line_at: float | None = None
) -> Markup:
    """Horizontal bars from 0, with whiskers where there are intervals, and a line to compare with."""
    labels = [textwrap.fill(bar.label, LABEL_LETTERS) for bar in bars]
    lines = max((label.count("\n") + 1 for label in labels), default=1)
    figure, axes = empty_figure(44 + max(27, 14 * lines) * len(bars))
    heights = np.arange(len(bars))[::-1]
    for y, bar in zip(heights, bars, strict=True):
        axes.barh(y, bar.value, height=0.62, color=SERIES[bar.color % len(SERIES)], linewidth=0)
        if bar.interval:
            axes.plot(bar.interval, [y, y], color=INK, linewidth=1.6, solid_capstyle="butt")
            axes.plot(bar.interval, [y, y], color=INK, linestyle="", marker="|", markersize=7)
        text = f"{bar.value:.1%}".replace("%", " %") if percent else f"{bar.value:.2f}".replace("-", "\N{MINUS SIGN}")
        axes.annotate(text, (1, y), **BESIDE, va="center", fontsize=9.5, color=INK, annotation_clip=False)
    axes.set_yticks(heights, labels, color=INK, fontsize=10)
    axes.set(xlim=limits, ylim=(-0.55, len(bars) - 0.45))
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    if percent:
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    if limits[0] < 0:
        axes.axvline(0, color=MUTED, linewidth=0.9)
    if line_at is not None:
        axes.axvline(line_at, color=INK, linewidth=1.1, linestyle=(0, (4, 3)))
    said = (
        f"{bar.label} {bar.value:.3g}{' ({:.3g} to {:.3g})'.format(*bar.interval) if bar.interval else ''}"
        for bar in bars
    )
    return inline_svg(figure, label, "; ".join(said))


def rate_chart(title: str, note: str, rates: Mapping[str, Any], colors: Mapping[str, int] | None = None) -> Chart:
    """Rate bars (label -> mapping of rate, low, high) with intervals, beside one half; a rate of None is left out."""
    bars = [
        Bar(name, rate["rate"], (rate["low"], rate["high"]), (colors or {}).get(name, 0))
        for name, rate in rates.items()
        if rate is not None
    ]
    return Chart(title, note, bar_chart(f"{title}, {note}", bars, limits=(0, 1), percent=True, line_at=0.5))


def empty_figure(height: float) -> tuple[Figure, Axes]:
    """An empty chart, WIDTH wide."""
    figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    return figure, axes


def _moving_average(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of about `width` neighbors around each value, fewer at the ends."""
    side = width // 2
    sums = window_sums(np.pad(values, side), 2 * side + 1)
    return sums / window_sums(np.pad(np.ones_like(values), side), 2 * side + 1)


def _thin(values: np.ndarray) -> np.ndarray:
    """At most POINTS_SHOWN values: means over equal segments; the last value is kept."""
    if len(values) <= POINTS_SHOWN:
        return values
    edges = np.linspace(0, len(values) - 1, POINTS_SHOWN, dtype=int)
    means = np.add.reduceat(values[:-1], edges[:-1]) / np.diff(edges)
    return np.append(means, values[-1])


def label_list(curves: Sequence[Curve]) -> Markup:
    """Colors and labels as a list above the chart, which breaks its lines where the window does."""
    items = (
        Markup('<li class="series-{}{}">{}</li>').format(one.color % len(SERIES), " dashed" * one.dashed, one.label)
        for one in curves
    )
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items)) if len(curves) > 1 else Markup("")


def _courses(curves: Sequence[Curve]) -> str:
    """Beginning, end and range of each line, in words."""
    return "; ".join(
        f"{one.label} from {one.y[0]:.3g} to {one.y[-1]:.3g}, between {min(one.y):.3g} and {max(one.y):.3g}".strip()
        for one in curves
    )


def padded_limits(values: Sequence[float]) -> tuple[float, float]:
    """Limits around 0 and all values, with some space at the ends."""
    low = min([0.0, *values])
    high = max([0.0, *values])
    room = 0.05 * (high - low or 1.0)
    return low - room if low < 0 else low, high + room if high > 0 else high


def inline_svg(figure: Figure, label: str, description: str = "") -> Markup:
    """The figure as an SVG element for an HTML page: page colors and typeface, no addresses, no names to collide.

    Args:
        label, description: read in place of the picture.
    """
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": label}):  # names of clips and markers: apart for every chart, equal every time
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    for pattern, replacement in REPLACED:
        svg = re.sub(pattern, replacement, svg)
    svg = re.sub(r' (?:d|x|y)="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]).replace("\n", ""), svg)
    words = Markup("<title>{}</title><desc>{}</desc>").format(label, description)
    return Markup(svg.replace("<svg", '<svg role="img"', 1).replace(">", f">{words}", 1))
