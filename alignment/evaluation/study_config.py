"""Settings of a study: its series, charts and figures."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from alignment.errors import suggest
from alignment.evaluation.overoptimization import Law

FITTED = ("kl", "gold")


@dataclass(frozen=True)
class SeriesConfig:
    """One series of points, from a run or from results.

    Attributes:
        columns: quantity of the study -> column of the source; of results a dotted key, such as `gold.total`.
        run: directory of a training run: a point for each line of its metrics.jsonl.
        results: a JSON file with results: a point for each item at the key `at`. Of several files the items of one name
            are one point; a key that more than one has is read from the first.
        at: dotted key of a mapping or a list in the results.
        names: of the items of the mapping, in order; None: all of them.
        smooth: points of a run that are averaged around each one, an odd number: a peak is read where noise is small.
        fit: law of over-optimization to fit to the quantities `kl` and `gold`.
        kept: column of a run whose highest value decides which weights it keeps, its `training.keep_best`; the point of that
            update is compared with the peak.
        kept_budget: column -> bound: from the first update on that exceeds a bound nothing is kept, as with
            `held_out.kl_budget` (`{held_out_kl: 2.0}`).
    """

    columns: dict[str, str]
    run: str | None = None
    results: str | list[str] | None = None
    at: str = ""
    names: list[str] | None = None
    smooth: int = 1
    fit: Law | None = None
    kept: str | None = None
    kept_budget: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.run is None) == (self.results is None) or self.results == []:
            raise ValueError("a series comes from either `run` or `results`")
        if not self.columns:
            raise ValueError("columns: name at least one quantity")
        if self.smooth < 1 or self.smooth % 2 == 0:
            raise ValueError(f"smooth must be an odd number of points, got {self.smooth}; 1 is none")
        if self.run is None and (self.smooth > 1 or self.kept is not None):
            raise ValueError("smooth and kept go with `run`, whose points are in order of training")
        if self.run is not None and (self.at or self.names is not None):
            raise ValueError("at and names go with `results`")
        if self.kept_budget and self.kept is None:
            raise ValueError("kept_budget goes with `kept`, the column by which weights are kept")
        if self.fit is not None and not set(FITTED) <= self.columns.keys():
            raise ValueError("fit needs the quantities kl and gold among the columns")

    @property
    def result_files(self) -> list[str]:
        """The files with results; none of a run."""
        return [self.results] if isinstance(self.results, str) else self.results or []


@dataclass(frozen=True)
class ChartConfig:
    """One chart.

    Attributes:
        x, y: quantities.
        title, note: over it.
        root: the horizontal axis shows the square root of x, values below 0 as 0.
        series: names of those that are shown; None: all that have both quantities.
        laws: draw the fitted laws beside the points.
    """

    x: str
    y: str
    title: str
    note: str = ""
    root: bool = False
    series: list[str] | None = None
    laws: bool = False


@dataclass(frozen=True)
class PeakConfig:
    """Where a quantity is highest within each series, and what happens to another one after that.

    Attributes:
        of: the quantity, such as the true score.
        against: the other one, such as the proxy that was optimized.
        series: those that are looked at.
    """

    of: str
    against: str
    series: list[str]


@dataclass(frozen=True)
class SavingsConfig:
    """How much of the increase of a cost each series takes back without losing what was gained.

    Attributes:
        cost, gain: quantities, such as the loss on text and the gold score.
        start: series of one point, before anything was learned.
        base: series of one point, with the whole increase.
        series: those that are compared.
        tolerance: a point counts where its gain is at least that of the base less this.
    """

    cost: str
    gain: str
    start: str
    base: str
    series: list[str]
    tolerance: float = 0.0


@dataclass(frozen=True)
class StudyConfig:
    """Settings of a study.

    Attributes:
        output: directory of results.json and report.html.
        title: heading of the page.
        series: name -> where its points come from.
        summary: a sentence or two under the heading.
        charts: in order.
        peak: where a quantity is highest; None: it is not looked for.
        savings: how much of a cost is taken back; None: nothing is compared.
    """

    output: str
    title: str
    series: dict[str, SeriesConfig]
    summary: str = ""
    charts: list[ChartConfig] = field(default_factory=list)
    peak: PeakConfig | None = None
    savings: SavingsConfig | None = None

    def __post_init__(self) -> None:
        for where, names, quantities in self._uses():
            for name in names:
                if name not in self.series:
                    raise ValueError(f"{where}: there is no series {name!r}; {suggest(name, self.series)}")
                if missing := [each for each in quantities if each not in self.series[name].columns]:
                    raise ValueError(f"{where}: series {name} has no {missing[0]!r} among its columns")
        known = {quantity for series in self.series.values() for quantity in series.columns}
        for where, _, quantities in self._uses():
            if unknown := [each for each in quantities if each not in known]:
                raise ValueError(f"{where}: no series has {unknown[0]!r}; {suggest(unknown[0], known)}")

    def _uses(self) -> Iterator[tuple[str, list[str], tuple[str, ...]]]:
        """Where series are named, which, and what they must have."""
        for chart in self.charts:
            yield f"charts: {chart.title}", chart.series or [], (chart.x, chart.y)
        if self.peak is not None:
            yield "peak", self.peak.series, (self.peak.of, self.peak.against)
        if self.savings is not None:
            own = self.savings
            yield "savings", [own.start, own.base, *own.series], (own.cost, own.gain)
