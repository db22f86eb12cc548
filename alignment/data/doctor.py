"""The data doctor: reads a data file as training would, reports common faults, and shows the first examples as text."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from alignment.data.batches import Example
from alignment.data.checks import Checks, Finding
from alignment.data.config import DataConfig
from alignment.data.rows.read import overlap, prompt_key, read_rows
from alignment.data.rows.records import Kind, Tally
from alignment.data.text.templates import with_chat_template
from alignment.data.tokenize import TOKENIZE
from alignment.data.tokenizers.tokenizer import Tokenizer, read_tokenizer_files
from alignment.errors import UserError

SHOWN_TOKENS = 160  # of an example


@dataclass
class Report:
    """Findings of the doctor in one file."""

    source: str
    kind: Kind
    counts: Tally
    findings: list[Finding] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True where no finding is an error."""
        return all(finding.level != "error" for finding in self.findings)

    def render(self) -> str:
        """The report as plain text."""
        verdict = "no errors" if self.ok else "errors found"
        findings = [f"  {finding.level}: {finding.text}" for finding in self.findings] or ["  nothing unusual"]
        parts = [f"{self.source}: {self.kind}, {verdict}", *self.counts.lines(), "findings", *findings]
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
    evaluation: str | Path | None = None,
    show: int = 3,
) -> Report:
    """Check a data file.

    Args:
        source: file or Hub id.
        kind: of its rows.
        tokenizer: directory (or loaded tokenizer); None: rows are checked as text only.
        template: name of a built-in chat template, or a file, to use in place of the tokenizer's own.
        max_length: tokens a row may have.
        columns: our column name -> the file's, where they differ.
        evaluation: held-out rows of the same kind and columns; those whose prompt is in `source` too are a finding.
        show: how many rows to render token by token.

    Returns:
        A report; `ok` is False where rows are bad or would train the wrong thing.

    Raises:
        UserError: no such file, no rows, wrong columns, no such tokenizer or template.
    """
    if max_length < 2:
        raise UserError(f"max_length must be at least 2 tokens, got {max_length}")
    if template is not None and tokenizer is None:
        raise UserError("--chat-template needs --tokenizer: a template becomes ids only through a tokenizer")
    coder = read_tokenizer_files(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    if coder is not None and template is not None:
        coder = with_chat_template(coder, str(template))
    rows, counts = read_rows(source, kind, columns=columns, on_bad_row="skip")
    checks = Checks(kind, coder, max_length)
    examples = list[Example]()
    samples = list[str]()
    refused = list[Finding]()
    if coder is not None:
        try:
            examples, tokenized = TOKENIZE[kind](rows, coder, max_length)
            counts = counts.followed_by(tokenized)
            samples = [show_example(example, coder) for example in examples[:show]]
        except UserError as error:
            refused = [Finding("error", str(error), "refused rows")]
    checks.add(rows, examples)
    if evaluation is not None:
        held_out, _ = read_rows(evaluation, kind, columns=columns, on_bad_row="skip")
        counts.trained_on = overlap(rows, held_out, prompt_key)
    findings = checks.findings(counts, max_cut_share=DataConfig.max_cut_share, max_length=max_length)
    return Report(str(source), kind, counts, [*refused, *findings], samples)


def show_example(example: Example, tokenizer: Tokenizer) -> str:
    """Tokens between bars, counted ones in square brackets; ids and boundaries below; each response under its name."""
    values = example.values
    margin = example.values.get("margin")
    masks = example.masks
    names = [""] * len(example.masks)
    order = list(range(len(example.masks)))
    if "ranks" in values:
        names = [f"response {index}, rank {rank}" for index, rank in enumerate(values["ranks"])]
        order.sort(key=values["ranks"].__getitem__)
    elif len(order) == 2:
        names = ["chosen", "rejected"]
    elif "desirable" in values:
        names = ["desirable" if values["desirable"] else "undesirable"]
    elif "ends" in values:
        names = ["steps: " + " ".join("right" if label else "wrong" for label in values["labels"])]
        masks = [[index in values["ends"] for index in range(len(example.ids))]]
    lines = [example.row_id + ("" if margin is None else f", margin {margin:g}")]
    for index in order:
        lines += [f" {names[index]}"] * bool(names[index]) + [_show(example.documents[index], masks[index], tokenizer)]
    return "\n".join(lines)


def _show(ids: list[int], mask: list[bool], tokenizer: Tokenizer) -> str:
    first = max(0, len(ids) - SHOWN_TOKENS)  # the end is where the mistakes are
    runs = [(counts, list(indices)) for counts, indices in groupby(range(len(ids)), key=mask.__getitem__)]
    spans = ["|".join(_token_texts([ids[index] for index in run if index >= first], tokenizer)) for _, run in runs]
    shown = " ".join(f"[{span}]" if counts else span for (counts, _), span in zip(runs, spans, strict=True) if span)
    ranges = ", ".join(f"{'counts' if counts else 'context'} {run[0]}-{run[-1]}" for counts, run in runs)
    before = f"... {first} tokens before ...\n  " if first else ""
    return (
        f"  {before}{shown}\n  ids {' '.join(map(str, ids[first:]))}\n  {len(ids)} tokens, {sum(mask)} count: {ranges}"
    )


def _token_texts(ids: list[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Tokens as text on one line, those of one character together; bytes of none as the vocabulary spells them."""
    start = 0
    while start < len(ids):
        for end in range(start + 1, start + 9):  # a character has at most four bytes
            text = str(tokenizer.decode(ids[start:end]))
            if "\ufffd" not in text:
                break
        else:
            end = start + 1
            text = ""
        text = text or str(tokenizer.convert_ids_to_tokens(ids[start]))
        yield text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
        start = end
