"""The data doctor: reads a data file as training would, reports common faults, and shows the first examples as text."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import mean

from alignment.data.config import DataConfig
from alignment.data.examples import Example, PairExample, PromptExample
from alignment.data.prepare import TOKENIZE
from alignment.data.rows.read import TIE, prompt_key, read_rows, record_key
from alignment.data.rows.records import Comparison, Kind, Record, Tally
from alignment.data.text import chat
from alignment.data.tokenize import PROMPT_CUT, RESPONSE_CUT
from alignment.data.tokenizers.load import read_tokenizer_files
from alignment.data.tokenizers.tokenizer import Tokenizer, bos_id, control_strings
from alignment.errors import UserError

CUT_SHARE = 0.01  # above these shares a finding is a warning
EQUAL_SHARE = 0.01
LENGTH_BIAS = 0.1  # |share of pairs whose chosen side is longer - 1/2|
SHOWN_TOKENS = 160  # of an example


@dataclass(frozen=True)
class Finding:
    """One observation: an error would spoil training, a warning may."""

    level: str  # error, warning, note
    text: str


@dataclass
class Report:
    """What the doctor found in one file."""

    source: str
    kind: Kind
    counts: Tally
    findings: list[Finding] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True where no finding is an error."""
        return all(finding.level != "error" for finding in self.findings)

    def add(self, level: str, text: str) -> None:
        """Add a finding."""
        self.findings.append(Finding(level, text))

    def render(self) -> str:
        """The report as plain text."""
        verdict = "no errors" if self.ok else "errors found"
        found = [f"  {finding.level}: {finding.text}" for finding in self.findings] or ["  nothing unusual"]
        parts = [f"{self.source}: {self.kind}, {verdict}", *self.counts.lines(), "findings", *found]
        if self.samples:
            parts += ["first rows  [counts] is trained on, the rest is context", *self.samples]
        return "\n".join(parts)


def check_file(
    source: str | Path,
    kind: Kind,
    tokenizer: str | Path | Tokenizer | None = None,
    template: str | Path | None = None,
    max_length: int = 1024,
    *,
    columns: dict[str, str] | None = None,
    show: int = 3,
) -> Report:
    """Check a data file.

    Args:
        source: file or Hub id.
        tokenizer: directory (or loaded tokenizer); None: rows are checked as text only.
        template: file with a chat template to use in place of the tokenizer's own.
        max_length: tokens a row may have.
        show: how many rows to render token by token.

    Returns:
        A report; `ok` is False where rows are bad or would train the wrong thing.

    Raises:
        UserError: no such file, no rows, wrong columns, no such tokenizer or template.
    """
    if max_length < 2:
        raise UserError(f"max_length must be at least 2 tokens, got {max_length}")
    coder = _tokenizer(tokenizer, template)
    rows, counts = read_rows(source, kind, columns=columns, on_bad_row="skip")
    report = Report(str(source), kind, counts)
    for reason, number in counts.dropped.items():
        level = "error" if reason != TIE else _level(number, counts.rows, EQUAL_SHARE)
        report.add(level, f"{number} rows: {reason} ({', '.join(counts.first[reason])})")
    _check_repeats(report, rows)
    if kind == "comparisons":
        _check_lengths(report, "characters", [(len(row.chosen), len(row.rejected)) for row in rows])  # type: ignore[union-attr]
    if coder is not None:
        _check_tokens(report, rows, coder, max_length, show)
    return report


def _level(number: int, rows: int, share: float) -> str:
    return "warning" if number > share * rows else "note"


def _tokenizer(tokenizer: str | Path | Tokenizer | None, template: str | Path | None) -> Tokenizer | None:
    if template is not None and tokenizer is None:
        raise UserError("--template needs --tokenizer: a template becomes ids only through a tokenizer")
    loaded = read_tokenizer_files(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    if template is not None and loaded is not None:
        if not Path(template).is_file():
            raise UserError(f"{template}: no such template file")
        loaded.chat_template = Path(template).read_text(encoding="utf-8")
    return loaded


def _check_repeats(report: Report, rows: Sequence[Record]) -> None:
    """Exact duplicates, and pairs that say the opposite of each other."""
    seen = Counter(record_key(row) for row in rows)
    copies = len(rows) - len(seen)
    if copies:
        report.add("warning", f"{copies} rows are exact copies of an earlier one")
    reversed_pairs = sum(
        (key[0], key[2], key[1]) in seen and key[1] < key[2] for key in seen if report.kind == "comparisons"
    )
    if reversed_pairs:
        report.add("warning", f"{reversed_pairs} prompts have the same two responses preferred both ways round")


def _check_lengths(report: Report, unit: str, pairs: Sequence[tuple[int, int]]) -> None:
    """Length bias: the accuracy of always preferring the longer response; ties count half."""
    if not pairs:
        return
    longer = mean(0.5 if chosen == rejected else float(chosen > rejected) for chosen, rejected in pairs)
    gap = mean(chosen - rejected for chosen, rejected in pairs)
    level = "warning" if abs(longer - 0.5) > LENGTH_BIAS else "note"
    report.add(level, f"chosen is {gap:+.1f} {unit} longer on average; 'the longer one wins' is right in {longer:.1%}")


def _check_tokens(report: Report, rows: Sequence[Record], tokenizer: Tokenizer, max_length: int, show: int) -> None:
    try:
        examples, tokenized = TOKENIZE[report.kind](rows, tokenizer, max_length)  # type: ignore[arg-type]
    except UserError as error:
        report.add("error", str(error))
        return
    report.counts = report.counts.followed_by(tokenized)
    for reason, number in tokenized.dropped.items():
        level = _level(number, tokenized.rows, EQUAL_SHARE)
        report.add(level, f"{number} rows dropped: {reason} ({', '.join(tokenized.first[reason])})")
    for what, number in tokenized.cut.items():
        level = "note" if report.kind == "text" else _level(number, tokenized.rows, CUT_SHARE)
        if what in (PROMPT_CUT, RESPONSE_CUT) and number > DataConfig.max_cut_share * tokenized.kept:
            level = "error"  # a run refuses so many
        report.add(level, f"{number} of {tokenized.rows} rows at max_length {max_length}: {what}")
    sides = [side for example in examples for side in _sides(example)]
    _check_ids(report, sides, tokenizer)
    _check_stops(report, sides, tokenizer, tokenized)
    _check_strings(report, rows, tokenizer)
    report.samples += [show_example(example, tokenizer) for example in examples[:show]]


def _sides(example: Example | PairExample | PromptExample) -> list[Example]:
    if isinstance(example, PairExample):
        return [example.chosen, example.rejected]
    if isinstance(example, PromptExample):
        return [Example(example.ids, [False] * len(example.ids), example.row_id)]
    return [example]


def _report_rows(
    report: Report, level: str, what: str, sides: Sequence[Example], test: Callable[[Example], bool]
) -> None:
    bad = list(dict.fromkeys(side.row_id for side in sides if test(side)))
    if bad:
        report.add(level, f"{len(bad)} rows {what} ({', '.join(bad[:3])})")


def _check_ids(report: Report, sides: Sequence[Example], tokenizer: Tokenizer) -> None:
    bos, unknown = bos_id(tokenizer), tokenizer.unk_token_id
    if bos is not None and bos not in chat.stop_token_ids(tokenizer):
        _report_rows(report, "error", "have more than one BOS", sides, lambda side: side.ids.count(bos) > 1)
    if unknown is not None and unknown not in chat.stop_token_ids(tokenizer):
        _report_rows(report, "warning", "have unknown tokens", sides, lambda side: unknown in side.ids)


def _check_stops(report: Report, sides: Sequence[Example], tokenizer: Tokenizer, tokenized: Tally) -> None:
    """Every trained span must end with a token that generation stops at, unless it was cut there."""
    if report.kind in ("text", "prompts"):
        return
    stops = chat.stop_token_ids(tokenizer)

    def unstopped(side: Example) -> bool:
        following = [*side.mask[1:], False]
        ends = [index for index, counts in enumerate(side.mask) if counts and not following[index]]
        return any(side.ids[index] not in stops for index in ends)

    bad = {side.row_id for side in sides if unstopped(side)}
    cut = sum(number for what, number in tokenized.cut.items() if what.startswith("response"))
    if len(bad) > cut:
        report.add("error", f"{len(bad) - cut} rows train no stop token ({', '.join(sorted(bad)[:3])})")


def _check_strings(report: Report, rows: Sequence[Record], tokenizer: Tokenizer) -> None:
    """Report control strings in texts: they stay text, which is safe, but the rows may have been rendered already."""
    strings = control_strings(tokenizer)
    stops = [str(token) for token in tokenizer.convert_ids_to_tokens(sorted(chat.stop_token_ids(tokenizer)))]

    def texts(row: Record) -> list[str]:
        if isinstance(row, Comparison):
            return [prompt_key(row), chat.without_end(row.chosen, stops), chat.without_end(row.rejected, stops)]
        return [prompt_key(row), chat.without_end(getattr(row, "response", ""), stops)]

    found = Counter(string for row in rows for string in strings if any(string in text for text in texts(row)))
    for string, number in found.items():
        report.add("warning", f"{number} rows hold {string!r} in their text; it is read as text, not as a token")


def show_example(example: Example | PairExample | PromptExample, tokenizer: Tokenizer) -> str:
    """Tokens between bars, those that count in square brackets; ids and boundaries below."""
    if isinstance(example, PairExample):
        margin = "" if example.margin is None else f", margin {example.margin:g}"
        chosen, rejected = (_show(side, tokenizer) for side in (example.chosen, example.rejected))
        return f"{example.row_id}{margin}\n chosen\n{chosen}\n rejected\n{rejected}"
    if isinstance(example, PromptExample):
        example = Example(example.ids, [False] * len(example.ids), example.row_id)
    return f"{example.row_id}\n{_show(example, tokenizer)}"


def _show(example: Example, tokenizer: Tokenizer) -> str:
    first = max(0, len(example.ids) - SHOWN_TOKENS)  # the end is where the mistakes are
    tokens = [token_text(index, tokenizer) for index in example.ids[first:]]
    spans = [
        ("[" if counts else "") + "|".join(tokens[index] for index in indices) + ("]" if counts else "")
        for counts, indices in groupby(range(len(tokens)), key=lambda index: example.mask[first + index])
    ]
    ids = " ".join(map(str, example.ids[first:]))
    left_out = f"... {first} tokens before ...\n  " if first else ""
    return (
        f"  {left_out}{' '.join(spans)}\n  ids {ids}\n"
        f"  {len(example.ids)} tokens, {sum(example.mask)} count: {boundaries(example.mask)}"
    )


def token_text(index: int, tokenizer: Tokenizer) -> str:
    """One token as text on one line; bytes that are no whole character show as the vocabulary spells them."""
    text = str(tokenizer.decode([index]))
    if "\ufffd" in text or not text:
        text = str(tokenizer.convert_ids_to_tokens(index))
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def boundaries(mask: list[bool]) -> str:
    """Runs of the mask with their first and last index: "context 0-4, counts 5-9"."""
    runs = [(counts, list(indices)) for counts, indices in groupby(range(len(mask)), key=lambda index: mask[index])]
    return ", ".join(f"{'counts' if counts else 'context'} {run[0]}-{run[-1]}" for counts, run in runs)
