"""Downstream tasks: labeled rows, how a model reads them, and their batches."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from alignment.data.config import NO_STREAMING, DataConfig, Part, SourceConfig, as_sources
from alignment.data.prepare import require_enough, rows_of_part
from alignment.data.rows.fields import BadRow, list_field, number_field, text_field, type_name
from alignment.data.rows.files import read_raw
from alignment.data.rows.published import choice_rows, pair_rows
from alignment.data.rows.read import ParsedRows, overlap, parse_rows, read_sources
from alignment.data.rows.records import Columns, Tally
from alignment.data.text.special_tokens import (
    EncodedText,
    SpecialTokenTemplate,
    TokenizedText,
    special_token_template,
    tokenize_with_offsets,
)
from alignment.data.tokenize import text_budget, truncate_longest
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError, raise_all
from alignment.losses.language import IGNORED
from alignment.ragged import Ragged, RaggedBatch, group_rows_by_length

FinetuneTask = Literal[
    "classification",
    "pair_classification",
    "regression",
    "token_classification",
    "question_answering",
    "multiple_choice",
]
Format = Literal["tokenizer", "gpt1", "gpt1_similarity"]
FORMATS: dict[FinetuneTask, tuple[Format, ...]] = {  # of the other tasks: tokenizer alone
    "classification": ("tokenizer", "gpt1"),
    "pair_classification": ("tokenizer", "gpt1", "gpt1_similarity"),
    "regression": ("tokenizer", "gpt1", "gpt1_similarity"),
    "multiple_choice": ("tokenizer", "gpt1"),
}
GPT1_TOKENS = ("<start>", "<delimiter>", "<extract>")

TEXT_END_CUT = "text longer than max_length: its end cut off"
PAIR_CUT = "pair longer than max_length: the longer text's end cut off"
NO_TEXT = "text of which the tokenizer makes no token"
WORDS_CUT = "words beyond max_length: cut off with their labels"
WORDS_LOST = "words without a token of their own: their labels are lost"
QUESTION_CUT = "question longer than max_question: its end cut off"
ANSWER_NOWHERE = "answer in no window as a whole: it is never seen"


@dataclass(frozen=True)
class TaskFormat:
    """A task and the form of its inputs and answers, as in `FinetuneConfig`; a fine-tuned model's config.json keeps it.

    Attributes:
        format: "tokenizer": the tokenizer's own special tokens. "gpt1": start, text, extract, or start, text,
            delimiter, text, extract. "gpt1_similarity": both orders of a pair, so that neither text comes first.

    Source: Radford et al. 2018, "Improving language understanding by generative pre-training", section 3.3, figure 1.
    """

    task: FinetuneTask
    format: Format = "tokenizer"
    max_length: int = 512
    stride: int = 128
    max_question: int = 64
    max_answer: int = 30
    no_answer: bool = False

    @property
    def names_classes(self) -> bool:
        """True where labels are names of classes."""
        return self.task not in ("regression", "question_answering", "multiple_choice")


@dataclass(frozen=True, slots=True)
class LabeledRow:
    """A row of a downstream task; an answer is its text and the index of its first character in the context."""

    inputs: tuple[
        Any, ...
    ]  # text and None; both of a pair; a list of words; question, context; context, list of choices
    labels: tuple[Any, ...]  # the class or number; the class of each word; the answers; the index of the right choice
    row_id: str

    @property
    def content(self) -> str:
        """A key that is equal for rows that differ only in their labels."""
        return repr(list(self.inputs))


def read_labeled(
    source: str | SourceConfig | Sequence[str | SourceConfig],
    task: FinetuneTask,
    *,
    max_rows: int | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
) -> tuple[list[LabeledRow], Tally]:
    """The labeled rows of one or several sources, in order, and the tally of dropped ones.

    Columns by task: classification `text`, `label`; pair_classification `text`, `pair`, `label`; regression `text`,
    perhaps `pair`, and `label`, a number; token_classification `words`, `labels` (lists of equal length);
    question_answering `question`, `context`, `answers` (a list of {text, answer_start}, or SQuAD's two lists);
    multiple_choice `context`, `choices`, `label` (index of the right choice). Of pairs and choices the columns in
    rows/published.py are known too.
    """
    reader = READERS[task]
    published = PUBLISHED.get(task, lambda row: [row])

    def parse(values: Columns, row_id: str) -> list[LabeledRow]:
        rows = published(values)
        names = [row_id] if len(rows) == 1 else [f"{row_id}[{index}]" for index in range(1, len(rows) + 1)]
        return [LabeledRow(*reader(row), name) for row, name in zip(rows, names, strict=True)]

    def read(each: SourceConfig, left: int | None) -> ParsedRows[LabeledRow]:
        return parse_rows(
            read_raw(each.source, str(each.split)),
            parse,
            columns=each.columns or {},
            max_rows=left,
        )

    return read_sources(as_sources(source), read, max_rows, on_bad_row)


Values = tuple[tuple[Any, ...], tuple[Any, ...]]  # inputs and labels of a row


def _words(row: Columns) -> Values:
    words = _texts(row, "words")
    labels = tuple(_label(label, "labels") for label in list_field(row, "labels"))
    if len(words) != len(labels):
        raise BadRow("labels", "must be as many as words", f"{len(labels)} labels, {len(words)} words")
    return (words,), labels


def _question(row: Columns) -> Values:
    context = text_field(row, "context")
    answers = row.get("answers")
    if isinstance(answers, dict):  # {"text": [...], "answer_start": [...]}, as the datasets library has SQuAD
        texts, starts = (list_field(answers, key, may_be_empty=True) for key in ("text", "answer_start"))
        if len(texts) != len(starts):
            raise BadRow("answers", "must have as many starts as texts", f"{len(texts)} and {len(starts)}")
        answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(answers, list) or not all(isinstance(answer, dict) for answer in answers):
        raise BadRow("answers", f"must be a list of text and answer_start, is {type_name(answers)}")
    return (text_field(row, "question"), context), tuple(_answer(answer, context) for answer in answers)


def _answer(answer: Columns, context: str) -> tuple[str, int]:
    text = text_field(answer, "text")
    start = number_field(answer, "answer_start")
    if start is None or start < 0 or context[int(start) : int(start) + len(text)] != text:
        raise BadRow("answers", "answer_start is not where the answer stands in the context", f"{text[:30]!r}, {start}")
    return text, int(start)


def _choice(row: Columns) -> Values:
    choices = _texts(row, "choices")
    label = number_field(row, "label")
    if label is None or label != int(label) or not 0 <= label < len(choices):
        raise BadRow("label", "must be the number of a choice, from 0", f"{row.get('label')!r} of {len(choices)}")
    return (text_field(row, "context"), choices), (int(label),)


def _texts(row: Columns, key: str) -> list[str]:
    return [text_field({key: text}, key) for text in list_field(row, key)]


def _label(value: object, key: str = "label") -> str:
    """The name of a label: text, or a whole number as text; -1, GLUE's value for unlabeled rows, is refused."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int) or value in ("", -1):
        raise BadRow(key, "must be a label: text or a whole number", f"{value!r}")
    return str(value)


def _number(row: Columns) -> Values:
    if (label := number_field(row, "label")) is None:
        raise BadRow("label", "must be a number", repr(row.get("label"))[:40])
    return (text_field(row, "text"), text_field(row, "pair") if "pair" in row else None), (label,)


READERS: dict[str, Callable[[Columns], Values]] = {
    "classification": lambda row: ((text_field(row, "text"), None), (_label(row.get("label")),)),
    "pair_classification": lambda row: (
        (text_field(row, "text"), text_field(row, "pair")),
        (_label(row.get("label")),),
    ),
    "regression": _number,
    "token_classification": _words,
    "question_answering": _question,
    "multiple_choice": _choice,
}
PUBLISHED: dict[str, Callable[[Columns], list[Columns]]] = {
    "pair_classification": pair_rows,
    "regression": pair_rows,
    "multiple_choice": choice_rows,
}


def label_names(rows: Iterable[LabeledRow]) -> dict[int, str]:
    """`id2label` of a model's config: the labels that occur, sorted, by value if all are numbers."""
    names = {name for row in rows for name in row.labels}
    if len(names) < 2:
        raise UserError(f"all rows have the same label {', '.join(names)!r}; a classifier needs at least two")
    numbers = all(name.removeprefix("-").isdecimal() for name in names)
    return dict(enumerate(sorted(names, key=int if numbers else None)))


def label_ids(rows: Iterable[LabeledRow], names: Mapping[int, str]) -> dict[str, int]:
    """The id of each label name; held-out rows may have labels that `names` lacks, which are refused."""
    ids = {name: label_id for label_id, name in names.items()}
    raise_all(
        f"{row.row_id}: label {', '.join(map(repr, unknown))} is unknown; known: {', '.join(ids)}"
        for row in rows
        if (unknown := sorted(set(row.labels) - ids.keys()))
    )
    return ids


@dataclass(frozen=True, slots=True)
class TaskExample:
    """A row, or one window of it, as token ids.

    The labels are the class or the number; or the class of each token, `IGNORED` where none counts; or first and last
    token of the answer, 0 and 0 where the window does not contain it; or the index of the right choice.
    """

    encoded: tuple[EncodedText, ...]  # its documents: one, both orders of a pair, or one for each choice
    labels: list[Any]
    row_id: str
    weight: int = 1  # number of labels that count; 1 of an answer
    word_tokens: tuple[int | None, ...] = ()  # of tagged words: first token of each; None for a word without one
    offsets: tuple[
        tuple[int, int] | None, ...
    ] = ()  # of a question: the context's characters of each token; None outside
    question: int = 0  # index of the question's row

    @property
    def documents(self) -> list[list[int]]:
        """The token ids of each document."""
        return [text.ids for text in self.encoded]


@dataclass(frozen=True)
class TaskBatch(RaggedBatch):
    """B rows as D documents, with their labels; its weight is the sum of the rows' weights."""

    labels: Tensor  # those of all rows, end to end, [L]
    rows: Tensor  # row, within the batch, that each document belongs to, [D]; a row's documents come in order


def collate_tasks(examples: Sequence[TaskExample], micro_batch_tokens: int) -> list[TaskBatch]:
    """Batches of at most `micro_batch_tokens` tokens, all documents of a row together; a longer row is alone."""
    lengths = [sum(map(len, example.documents)) for example in examples]
    return [_batch(group) for group in group_rows_by_length(examples, lengths, micro_batch_tokens)]


def _batch(examples: Sequence[TaskExample]) -> TaskBatch:
    texts = [text for example in examples for text in example.encoded]
    ragged = Ragged.build(
        [text.ids for text in texts],
        weight=sum(example.weight for example in examples),
        row_ids=[example.row_id for example in examples for _ in example.encoded],
        segments=[text.segments for text in texts],
    )
    sizes = torch.tensor([len(example.encoded) for example in examples])
    return TaskBatch(
        ragged,
        labels=torch.tensor([label for example in examples for label in example.labels]),
        rows=torch.repeat_interleave(torch.arange(len(examples)), sizes),
    )


@dataclass(frozen=True)
class LabeledExamples:
    """One part of the labeled data: its rows, their examples, and id2label (empty for questions and choices)."""

    examples: list[TaskExample]
    rows: list[LabeledRow]
    counts: Tally
    names: dict[int, str]


def prepare_labeled(
    config: DataConfig,
    form: TaskFormat,
    tokenizer: Tokenizer,
    part: Part = "train",
    *,
    names: dict[int, str] | None = None,
) -> LabeledExamples:
    """The examples of one part of labeled data; `names` is the id2label that its rows must keep to, if any."""
    if config.streaming:
        raise UserError(NO_STREAMING)
    read_part = partial(read_labeled, task=form.task, max_rows=config.max_rows, on_bad_row=config.on_bad_row)
    rows, read = read_part(config.require_sources(part))
    if names is None:
        names = label_names(rows) if form.names_classes else {}
    if config.evaluation_share is not None:
        rows, read = rows_of_part(rows, read, lambda row: row.content, config, part)
    examples, tokenized = encode_rows(rows, form, tokenizer, names)
    counts = require_enough(read.followed_by(tokenized), config, part)
    if part == "evaluation" and config.evaluation_share is None:
        counts.trained_on = overlap(read_part(config.require_sources("train"))[0], rows, lambda row: row.content)
    return LabeledExamples(examples, rows, counts, names)


def encode_rows(
    rows: Sequence[LabeledRow], form: TaskFormat, tokenizer: Tokenizer, names: Mapping[int, str] = {}
) -> tuple[list[TaskExample], Tally]:
    """The examples of rows, in order, and the tally of what was dropped and cut; `names` is id2label."""
    if form.task == "question_answering":
        encoded = _encode_questions(rows, form, tokenizer)
    elif form.task == "token_classification":
        encoded = _encode_words(rows, form, tokenizer, label_ids(rows, names))
    else:
        encoded = _encode_texts(rows, form, tokenizer, label_ids(rows, names) if form.names_classes else {})
    examples, counts = encoded
    return examples, counts.with_documents(document for example in examples for document in example.documents)


def _encode_texts(
    rows: Sequence[LabeledRow], form: TaskFormat, tokenizer: Tokenizer, ids: Mapping[str, int]
) -> tuple[list[TaskExample], Tally]:
    """Texts, pairs and choices; the longer text of a pair loses its end first."""
    template = special_token_template(tokenizer)
    if form.format != "tokenizer":  # the tokenizer is one of `add_gpt1_tokens`
        start, delimiter, extract = ([tokenizer.get_vocab()[token]] for token in GPT1_TOKENS)
        template = SpecialTokenTemplate((start, extract), (start, delimiter, extract), (0,) * 5)
    counts = Tally(rows=len(rows))
    examples = []
    documents = [_documents(row, form) for row in rows]
    encoded = iter(tokenize_with_offsets(tokenizer, [text for row in documents for texts in row for text in texts]))
    for row, of_row in zip(rows, documents, strict=True):
        tokens = [[next(encoded).ids for _ in texts] for texts in of_row]
        if not all(ids for texts in tokens for ids in texts):
            counts.drop(NO_TEXT, row.row_id)
            continue
        budget = text_budget(form.max_length, template.size(len(tokens[0])))
        if any(sum(map(len, texts)) > budget for texts in tokens):
            counts.note_cut(TEXT_END_CUT if len(tokens[0]) == 1 else PAIR_CUT, row.row_id)
        kept = tuple(template.encode(*truncate_longest(texts, budget)) for texts in tokens)
        examples.append(TaskExample(kept, [ids.get(label, label) for label in row.labels], row.row_id))
    return examples, counts


def _documents(row: LabeledRow, form: TaskFormat) -> list[list[str]]:
    """The texts of each document of a row."""
    first, second = row.inputs
    if form.task == "multiple_choice":
        return [[first, choice] for choice in second]
    if form.format == "gpt1_similarity":
        return [[first, second], [second, first]]
    return [[first] if second is None else [first, second]]


def add_gpt1_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """A copy of the tokenizer with <start>, <delimiter> and <extract>, added as last tokens where it lacks them."""
    extended = copy.deepcopy(tokenizer)
    lacking = [token for token in GPT1_TOKENS if token not in extended.get_vocab()]
    extended.add_special_tokens({"extra_special_tokens": lacking}, replace_extra_special_tokens=False)
    return extended


def _encode_words(
    rows: Sequence[LabeledRow], form: TaskFormat, tokenizer: Tokenizer, ids: Mapping[str, int]
) -> tuple[list[TaskExample], Tally]:
    """Words joined by blanks; each word's label is that of its first token, its other tokens are ignored.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 5.3.
    """
    template = special_token_template(tokenizer)
    counts = Tally(rows=len(rows))
    budget = text_budget(form.max_length, template.size(1))
    examples = []
    for row, text in zip(
        rows, tokenize_with_offsets(tokenizer, [" ".join(row.inputs[0]) for row in rows]), strict=True
    ):
        firsts = first_tokens(row.inputs[0], text)
        for _ in range(firsts.count(None)):
            counts.note_cut(WORDS_LOST, row.row_id)
        for _ in range(sum(first is not None and first >= budget for first in firsts)):
            counts.note_cut(WORDS_CUT, row.row_id)
        encoded = template.encode(text.ids[:budget])
        tokens = [None if first is None or first >= budget else first + encoded.starts[0] for first in firsts]
        of_tokens = {token: ids[label] for token, label in zip(tokens, row.labels, strict=True) if token is not None}
        labels = [of_tokens.get(position, IGNORED) for position in range(len(encoded.ids))]
        examples.append(TaskExample((encoded,), labels, row.row_id, weight=len(of_tokens), word_tokens=tuple(tokens)))
    return examples, counts


def first_tokens(words: Sequence[str], tokenized: TokenizedText) -> list[int | None]:
    """Index of each word's first token; None for a word without one. `tokenized` has the words joined by blanks."""
    text = " ".join(words)
    word_of: list[int | None] = []  # by character
    for word_index, word in enumerate(words):
        word_of += [word_index] * len(word) + [None]  # the blank after a word belongs to no word
    firsts: list[int | None] = [None] * len(words)
    for index, (start, stop) in enumerate(tokenized.offsets):
        inside = next((at for at in range(start, stop) if not text[at].isspace()), None)  # skip the token's own blank
        word = None if inside is None else word_of[inside]
        if word is not None and firsts[word] is None:
            firsts[word] = index
    return firsts


def _encode_questions(
    rows: Sequence[LabeledRow], form: TaskFormat, tokenizer: Tokenizer
) -> tuple[list[TaskExample], Tally]:
    """Question and context as a pair, a long context in overlapping windows, the answer as first and last token.

    The first answer of a row is the label; a window that does not contain all of it is labeled with its first token.

    Source: Devlin et al. 2019, arXiv:1810.04805, sections 4.2 and 4.3; windows: google-research/bert, run_squad.py.
    """
    template = special_token_template(tokenizer)
    counts = Tally(rows=len(rows))
    examples: list[TaskExample] = []
    encoded = tokenize_with_offsets(tokenizer, [text for row in rows for text in row.inputs])
    for row_index, (row, question, context) in enumerate(zip(rows, encoded[::2], encoded[1::2], strict=True)):
        asked = question.ids[: form.max_question]
        if len(question.ids) > len(asked):
            counts.note_cut(QUESTION_CUT, row.row_id)
        size = text_budget(form.max_length, template.size(2) + len(asked))
        if not 1 <= form.stride <= size:
            raise UserError(f"stride must be from 1 to the {size} tokens that a window has room for, got {form.stride}")
        answer = token_span(context, *row.labels[0]) if row.labels else None
        windows = []
        for first in window_starts(len(context.ids), size, form.stride):
            text = template.encode(asked, context.ids[first : first + size])
            inside = context.offsets[first : first + size]
            before = text.starts[1]
            after = len(text.ids) - text.starts[1] - len(inside)
            holds = answer is not None and first <= answer[0] and answer[1] < first + len(inside)
            labels = [token - first + before for token in answer] if answer is not None and holds else [0, 0]
            offsets = (*(None,) * before, *inside, *(None,) * after)
            windows.append(TaskExample((text,), labels, row.row_id, offsets=offsets, question=row_index))
        examples += windows
        if row.labels and all(window.labels == [0, 0] for window in windows):
            counts.note_cut(ANSWER_NOWHERE, row.row_id)
    return examples, counts


def window_starts(length: int, size: int, stride: int) -> list[int]:
    """First tokens of windows of `size` tokens, `stride` apart; the last window reaches the end of the text."""
    return list(range(0, max(1, length - size + stride), stride))


def token_span(text: TokenizedText, answer: str, start: int) -> tuple[int, int] | None:
    """First and last token of an answer that begins at character `start`; None where no token covers any of it."""
    stop = start + len(answer)
    inside = [index for index, (first, last) in enumerate(text.offsets) if first < stop and last > start]
    return (inside[0], inside[-1]) if inside else None
