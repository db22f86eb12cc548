"""Texts and batches of every pretraining objective: masked texts, sentence pairs of BERT and ALBERT, encoder-decoders.

The corruption itself is in corruption.py.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from alignment.data.batches import Example
from alignment.data.config import DataConfig, Part
from alignment.data.prepare import Preparation, Tokenize, prepare_with
from alignment.data.pretraining import corruption
from alignment.data.pretraining.corruption import NOT_CHOSEN, Ids, Masking, SeededRow
from alignment.data.rows.records import Tally, Text
from alignment.data.streaming import open_stream
from alignment.data.table import Rows, column_of, mask_of, runs_of
from alignment.data.text.special_tokens import (
    EncodedText,
    SpecialTokenTemplate,
    TokenizedText,
    document_end_id,
    sentinel_ids,
    special_token_template,
    tokenize_with_offsets,
)
from alignment.data.tokenize import TEXT_CUT, even_slices, text_budget, tokenize_texts, truncate_longest
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.ragged import Ragged, RaggedBatch, Seq2Seq, group_rows_by_length

Objective = Literal["causal", "masked", "sentence_pairs", "span_corruption", "prefix", "infilling"]
Noise = Literal["infilling", "masking", "deletion", "permutation", "rotation"]
Corrupt = Callable[[Ids, np.random.Generator], tuple[list[int], list[int]]]  # a text -> source and target
TOO_SHORT = "text of a single token, too short for a source and a target"
MASK_NAMES = ("<mask>", "[MASK]")  # looked up where the tokenizer names no mask token
NO_TOKEN = "text of which the tokenizer makes no token"
FOLLOWS = 0
OTHER_TEXT = 1
ONE_SENTENCE = "text of fewer than two sentences: no pair can be made"
LONG_SENTENCES = "two sentences longer than max_length: the longer one's end cut off"
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\s*\n\s*")
Sentence = list[tuple[int, bool]]  # token ids, and True where a word begins
MaskedExample = tuple[Example, np.ndarray, np.ndarray]  # with its corrupted ids, and the group of each token, [N]


# Masked texts


class MaskTokens(NamedTuple):
    """The id of the mask token, and the ids that random replacements are drawn from, ascending: no special tokens."""

    mask_id: int
    random_ids: np.ndarray


def mask_tokens_of(tokenizer: Tokenizer) -> MaskTokens:
    """The mask tokens of a tokenizer."""
    vocabulary = tokenizer.get_vocab()
    candidates = (tokenizer.mask_token_id, *map(vocabulary.get, MASK_NAMES))
    if (mask := next((candidate for candidate in candidates if candidate is not None), None)) is None:
        raise UserError(
            f"{tokenizer.name_or_path or 'the tokenizer'} has no mask token; train a wordpiece one, or a bpe one whose "
            "special tokens hold <mask>"
        )
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return MaskTokens(mask, np.array(sorted({*vocabulary.values()} - special - {*tokenizer.all_special_ids, mask})))


def corruption_example(
    text: EncodedText, words: Sequence[Sequence[bool]], row_id: str, source: int = 0, **values: object
) -> Example:
    """A text or a pair with its special tokens; its mask is True for its own tokens.

    Its value `word_starts` is the runs of `words`, which are True where a word of a text begins; the first token begins
    one, even of a part of a text.
    """
    starts = [False] * len(text.ids)
    for first, flags in zip(text.starts, words, strict=True):
        starts[first : first + len(flags)] = [True, *flags[1:]] if flags else []
    return Example.single(text.ids, text.is_text, row_id, source, word_starts=runs_of(starts), **values)


def tokenize_for_corruption(rows: Sequence[Text], tokenizer: Tokenizer, max_length: int) -> tuple[list[Example], Tally]:
    """Texts for masked language modeling; a longer text is split into successive parts of about equal length."""
    template = special_token_template(tokenizer)
    parts, counts = split_texts(rows, tokenizer, text_budget(max_length, template.size(1), least=1), {0: NO_TOKEN})
    examples = [
        corruption_example(template.encode(text.ids[part]), [text.word_starts[part]], row.row_id)
        for row, text, part in parts
    ]
    return examples, counts.with_documents(example.ids for example in examples)


def split_texts(
    rows: Sequence[Text], tokenizer: Tokenizer, budget: int, dropped: Mapping[int, str]
) -> tuple[list[tuple[Text, TokenizedText, slice]], Tally]:
    """Each text in parts of at most `budget` tokens; a text whose length is in `dropped` is dropped for that reason."""
    parts = []
    counts = Tally(rows=len(rows))
    for row, text in zip(rows, tokenize_with_offsets(tokenizer, [row.text for row in rows]), strict=True):
        if len(text.ids) in dropped:
            counts.drop(dropped[len(text.ids)], row.row_id)
            continue
        if len(text.ids) > budget:
            counts.note_cut(TEXT_CUT, row.row_id)
        parts += [(row, text, part) for part in even_slices(len(text.ids), budget)]
    return parts, counts


def collate_masked(
    rows: Sequence[SeededRow[Example]], micro_batch_tokens: int, *, masking: Masking, mask_tokens: MaskTokens
) -> list[Ragged]:
    """Masked texts as ragged batches: targets are the chosen positions, `labels` the original tokens.

    The weight of a batch is the number of its targets.
    """
    masked = [mask_example(row.row, masking, mask_tokens, row.generator()) for row in rows]
    return [masked_batch(group) for group in _grouped(masked, micro_batch_tokens)]


def _grouped(masked: Sequence[MaskedExample], micro_batch_tokens: int) -> list[list[MaskedExample]]:
    return group_rows_by_length(masked, [len(ids) for _, ids, _ in masked], micro_batch_tokens)


def mask_example(
    example: Example, masking: Masking, mask_tokens: MaskTokens, generator: np.random.Generator
) -> MaskedExample:
    """The example with its ids corrupted."""
    choice = corruption.choose(example.mask, mask_of(example.values["word_starts"]), masking, generator)
    ids = corruption.replace_chosen(example.ids, choice, masking, generator, **mask_tokens._asdict())
    return example, ids, choice


def masked_batch(masked: Sequence[MaskedExample]) -> Ragged:
    """One ragged batch of masked examples."""
    ragged = Ragged.build([ids.tolist() for _, ids, _ in masked], row_ids=[example.row_id for example, _, _ in masked])
    ragged = ragged.with_sources([example.source for example, _, _ in masked])
    targets = torch.from_numpy(np.flatnonzero(np.concatenate([choice for _, _, choice in masked]) != NOT_CHOSEN))
    rows = torch.repeat_interleave(torch.arange(len(masked)), torch.tensor(ragged.lengths))
    originals = torch.tensor([token for example, _, _ in masked for token in example.ids])
    return replace(
        ragged, target_index=targets, target_rows=rows[targets], labels=originals[targets], weight=float(len(targets))
    )


@dataclass(frozen=True)
class SpanBatch(RaggedBatch):
    """Masked spans with the boundaries of the span of each target; its weight is the number of targets.

    `boundaries`: of each target the tokens before and after its span and its place in it, [M, 3].
    """

    boundaries: Tensor

    @property
    def counted_sources(self) -> Tensor | None:
        """Data source of each target, [M]."""
        return self.ragged.counted_sources


def collate_spans(
    rows: Sequence[SeededRow[Example]], micro_batch_tokens: int, *, masking: Masking, mask_tokens: MaskTokens
) -> list[SpanBatch]:
    """Batches of `collate_masked` with the boundaries of their spans; a text has tokens before and after its own."""
    masked = [mask_example(row.row, masking, mask_tokens, row.generator()) for row in rows]
    batches = []
    for group in _grouped(masked, micro_batch_tokens):
        ragged = masked_batch(group)
        boundaries = torch.from_numpy(np.concatenate([corruption.span_boundaries(choice) for _, _, choice in group]))
        boundaries[:, :2] += ragged.starts[ragged.target_rows, None]
        batches.append(SpanBatch(ragged, boundaries))
    return batches


@dataclass(frozen=True)
class SentencePairBatch(RaggedBatch):
    """P masked pairs A B, and 0 or 1 of each: 0 where B follows A in its text.

    Its weight is P; `ragged` counts masked tokens.
    """

    labels: Tensor

    @property
    def weight(self) -> float:
        """Pairs that count."""
        return float(len(self.labels))

    @cached_property
    def token_shares(self) -> Tensor:
        """1 / masked tokens of its pair, for each masked token, [M]: the masked loss is a sum of means over pairs."""
        counts = torch.bincount(self.ragged.target_rows, minlength=len(self.labels))
        return 1.0 / counts[self.ragged.target_rows]


def passage_of(sentences: Sequence[Sentence], text: int, row_id: str) -> Example:
    """Successive sentences of one text that together about fill a pair; True where words begin, with their `sizes`."""
    ids, starts = zip(*(token for sentence in sentences for token in sentence), strict=True)
    return Example.single([*ids], [*starts], row_id, sizes=[len(sentence) for sentence in sentences], text=text)


def sentences_in(passage: Example) -> list[Sentence]:
    """The sentences of a passage."""
    tokens = list(zip(passage.ids, passage.mask, strict=True))
    return [tokens[start:stop] for start, stop in pairwise([0, *accumulate(passage.values["sizes"])])]


def sentences_of(text: str) -> list[str]:
    """The text split after . ! and ? before white space, and at line breaks; no sentence is empty."""
    return [sentence for sentence in SENTENCE_END.split(text) if sentence.strip()]


def tokenize_passages(rows: Sequence[Text], tokenizer: Tokenizer, max_length: int) -> tuple[list[Example], Tally]:
    """Texts as passages of successive sentences; each sentence is in one passage."""
    counts = Tally(rows=len(rows))
    passages = []
    budget = text_budget(max_length, special_token_template(tokenizer).size(2))
    for document, row in enumerate(rows):
        texts = tokenize_with_offsets(tokenizer, sentences_of(row.text))
        sentences = [list(zip(text.ids, text.word_starts, strict=True)) for text in texts if text.ids]
        if len(sentences) < 2:
            counts.drop(ONE_SENTENCE, row.row_id)
            continue
        groups = group_sentences([len(sentence) for sentence in sentences], budget)
        passages += [passage_of(sentences[part], document, row.row_id) for part in groups]
        for part in groups:
            if _tokens(sentences[part]) > budget:
                counts.note_cut(LONG_SENTENCES, row.row_id)
    counts = counts.with_documents(passage.ids for passage in passages)
    if counts.kept < 2:
        raise UserError("sentence pairs need at least two texts of two sentences or more; " + counts.lines()[0])
    return passages, counts


def check_texts(passages: Sequence[Example], part: Part) -> None:
    """Refuse passages of a single text, to which no other text gives a second sentence; ends at the second text."""
    first = passages[0].values["text"] if len(passages) else None
    if all(passage.values["text"] == first for passage in passages):
        raise UserError(
            f"data: all {len(passages)} passages of the {part} text are of one text, and the second sentence of a pair "
            "comes from another one; change data.evaluation_share, add texts, or set objective.task=sentence_order"
        )


def group_sentences(lengths: Sequence[int], budget: int) -> list[slice]:
    """Successive groups of at least two sentences, each of at most `budget` tokens unless two sentences are longer."""
    edges = [0]
    filled = 0
    for index, length in enumerate(lengths):
        if index - edges[-1] >= 2 and filled + length > budget:
            edges.append(index)
            filled = 0
        filled += length
    if len(lengths) - edges[-1] == 1:  # a single last sentence takes one from the group before, or joins it
        if len(edges) > 1 and edges[-1] - edges[-2] > 2:
            edges[-1] -= 1
        else:
            edges.pop()
    return [slice(start, stop) for start, stop in pairwise([*edges, len(lengths)])]


def collate_sentence_pairs(
    rows: Sequence[SeededRow[Example]],
    micro_batch_tokens: int,
    *,
    make: Callable[[Example, np.random.Generator], Example],
    masking: Masking,
    mask_tokens: MaskTokens,
) -> list[SentencePairBatch]:
    """Masked pairs as batches; `make` makes the pair of a passage: see `make_pair` and `ordered_pair`."""
    masked = []
    for row in rows:
        generator = row.generator()
        pair = make(row.row, generator)
        masked.append(mask_example(pair, masking, mask_tokens, generator))
    batches = []
    for group in _grouped(masked, micro_batch_tokens):
        segments = torch.tensor([segment for pair, _, _ in group for segment in pair.values["segments"]])
        labels = torch.tensor([pair.values["label"] for pair, _, _ in group])
        batches.append(SentencePairBatch(replace(masked_batch(group), segments=segments), labels))
    return batches


def make_pair(
    passage: Example,
    generator: np.random.Generator,
    *,
    passages: Sequence[Example],
    template: SpecialTokenTemplate,
    max_length: int,
) -> Example:
    """A passage split at a random sentence, its second half replaced with probability 1/2: [CLS] A [SEP] B [SEP].

    The replacement is about as long as what it replaces, so that the length does not give the label away. What is
    replaced is not read in this epoch; another epoch splits and replaces differently. The values are `segments`, 0 or 1
    for the text of each token, and the `label`, 0 where B follows A in its text and 1 where it comes from another.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1 and appendix A.2.
    """
    first, second = _halves(passage, generator)
    if generator.random() < 0.5:
        other = other_sentences(passage, passages, _tokens(second), generator)
        return _pair(passage, (first, other), OTHER_TEXT, template, max_length)
    return _pair(passage, (first, second), FOLLOWS, template, max_length)


def ordered_pair(
    passage: Example, generator: np.random.Generator, *, template: SpecialTokenTemplate, max_length: int
) -> Example:
    """A passage split at a random sentence, its halves swapped with probability 1/2: [CLS] A [SEP] B [SEP].

    The values are those of `make_pair`; the label is 0 where B follows A in its text and 1 where A follows B.

    Source: Lan et al. 2020, arXiv:1909.11942, section 3.1 (sentence-order prediction).
    """
    halves = _halves(passage, generator)
    swapped = int(generator.random() < 0.5)
    return _pair(passage, halves[::-1] if swapped else halves, swapped, template, max_length)


def _halves(passage: Example, generator: np.random.Generator) -> tuple[list[Sentence], list[Sentence]]:
    sentences = sentences_in(passage)
    edge = int(generator.integers(1, len(sentences)))
    return sentences[:edge], sentences[edge:]


def _pair(
    passage: Example, halves: Sequence[list[Sentence]], label: int, template: SpecialTokenTemplate, max_length: int
) -> Example:
    """Two halves with special tokens, the longer one truncated where there is no room."""
    sides = [[token for sentence in half for token in sentence] for half in halves]
    kept = truncate_longest(sides, text_budget(max_length, template.size(2)))
    encoded = template.encode(*([token for token, _ in side] for side in kept))
    words = [[starts for _, starts in side] for side in kept]
    return corruption_example(encoded, words, passage.row_id, passage.source, segments=encoded.segments, label=label)


def other_sentences(
    passage: Example, passages: Sequence[Example], tokens: int, generator: np.random.Generator
) -> list[Sentence]:
    """Successive sentences of a passage of another text, together as close to `tokens` as whole sentences allow."""
    other = passage
    while other.values["text"] == passage.values["text"]:
        other = passages[int(generator.integers(len(passages)))]
    sentences = sentences_in(other)
    starts = [start for start in range(1, len(sentences)) if _tokens(sentences[start:]) >= tokens]
    start = int(generator.integers(len(starts) + 1))  # fewer sentences have fewer tokens: starts are 1, 2, ...
    stop = start + 1
    while stop < len(sentences) and _tokens(sentences[start:stop]) + len(sentences[stop]) / 2 <= tokens:
        stop += 1
    return sentences[start:stop]


def _tokens(sentences: Sequence[Sentence]) -> int:
    return sum(map(len, sentences))


# Encoder-decoders


def tokenize_plain(
    rows: Sequence[Text], tokenizer: Tokenizer, max_length: int, special_tokens: int = 1
) -> tuple[list[Example], Tally]:
    """Texts for encoder-decoders, without special tokens, in parts whose sources have at most `max_length` tokens.

    Corruption will add the `special_tokens`: an end token, or BART's decoder start, first and last token.
    """
    budget = text_budget(max_length, special_tokens, least=3)
    parts, counts = split_texts(rows, tokenizer, budget, {0: NO_TOKEN, 1: TOO_SHORT})
    examples = [
        Example.single(text.ids[part], [True] * (part.stop - part.start), row.row_id) for row, text, part in parts
    ]
    return examples, counts.with_documents(example.ids for example in examples)


def span_corruption(
    tokenizer: Tokenizer, examples: Sequence[Example], *, density: float = 0.15, mean_span: float = 3.0
) -> Corrupt:
    """T5's span corruption of a text: source and target of `corrupt_spans`, each with the end token after it."""
    sentinels = sentinel_ids(tokenizer)
    end = document_end_id(tokenizer)
    lengths = np.unique(column_of(examples, "longest")).tolist()
    needed = 1 + max(corruption.span_plan(length, density, mean_span)[1] for length in lengths)
    if needed > len(sentinels):
        raise UserError(
            f"{tokenizer.name_or_path or 'the tokenizer'} has {len(sentinels)} sentinels (<extra_id_0>, ...), and a "
            f"text of {max(lengths)} tokens takes {needed}; lower data.max_length, "
            "lengthen the mean span, or train the tokenizer with more sentinels"
        )
    corrupt = partial(corruption.corrupt_spans, sentinels=sentinels, density=density, mean_span=mean_span)
    return lambda ids, generator: _ended(corrupt(ids, generator=generator), end)


def prefix_modeling(tokenizer: Tokenizer) -> Corrupt:
    """T5's prefix language modeling of a text: its first part and the rest, each with the end token after it."""
    end = document_end_id(tokenizer)
    return lambda ids, generator: _ended(corruption.split_prefix(ids, generator), end)


def denoising(
    tokenizer: Tokenizer, *, noises: Sequence[Noise] = ("infilling",), density: float = 0.3, mean_span: float = 3.0
) -> Corrupt:
    """BART's denoising: a text after each noise in turn, and whole, both with the tokenizer's special tokens.

    A sentence ends after a token whose text ends in a full stop, question mark or exclamation mark.
    """
    mask = mask_tokens_of(tokenizer).mask_id
    template = special_token_template(tokenizer)
    stops = frozenset(token_id for token, token_id in tokenizer.get_vocab().items() if token.endswith((".", "!", "?")))
    functions: dict[Noise, Callable[..., list[int]]] = {
        "infilling": partial(corruption.infill, mask_id=mask, density=density, mean_span=mean_span),
        "masking": partial(corruption.mask_random_tokens, mask_id=mask, density=density),
        "deletion": partial(corruption.delete_tokens, density=density),
        "permutation": partial(corruption.permute_sentences, stops=stops),
        "rotation": corruption.rotate_text,
    }

    def corrupt(ids: Ids, generator: np.random.Generator) -> tuple[list[int], list[int]]:
        source = list(ids)
        for noise in noises:
            source = functions[noise](source, generator=generator)
        return template.encode(source).ids, template.encode(ids).ids

    return corrupt


def _ended(sides: tuple[list[int], list[int]], end: int) -> tuple[list[int], list[int]]:
    return [*sides[0], end], [*sides[1], end]


def collate_seq2seq(
    rows: Sequence[SeededRow[Example]], micro_batch_tokens: int, *, corrupt: Corrupt, start_id: int
) -> list[Seq2Seq]:
    """Corrupted texts as batches for encoder-decoders, source and target together at most `micro_batch_tokens` tokens.

    Each target begins with `start_id`, which starts the decoder and is never predicted.
    """
    sides = [corrupt(row.row.ids, row.generator()) for row in rows]
    pairs = [(row.row, source, [start_id, *target]) for row, (source, target) in zip(rows, sides, strict=True)]
    lengths = [len(source) + len(target) for _, source, target in pairs]
    batches = []
    for group in group_rows_by_length(pairs, lengths, micro_batch_tokens):
        examples, sources, targets = zip(*group, strict=True)
        names = [example.row_id for example in examples]
        nothing = [[False] * len(source) for source in sources]
        decoder = Ragged.build(targets, row_ids=names).with_sources([example.source for example in examples])
        batches.append(Seq2Seq(Ragged.build(sources, nothing, row_ids=names), decoder))
    return batches


def collate_in_one(
    rows: Sequence[SeededRow[Example]],
    micro_batch_tokens: int,
    *,
    corrupt: Corrupt,
    with_bos: Callable[[list[int]], list[int]],
    prefix_mask: bool,
) -> list[Ragged]:
    """Source and target of each corrupted text as one document for a decoder; the targets are the target's tokens.

    The source's end token is left out. With `prefix_mask` the source is a prefix that is read in both directions.

    Source: Raffel et al. 2020, arXiv:1910.10683, sections 3.2.1 and 3.2.3 (language model and prefix language model).
    """
    documents = []
    for row in rows:
        source, target = corrupt(row.row.ids, row.generator())
        source = with_bos(source[:-1])
        documents.append((row.row, len(source), [*source, *target]))
    batches = []
    for group in group_rows_by_length(documents, [len(ids) for _, _, ids in documents], micro_batch_tokens):
        examples, sources, texts = zip(*group, strict=True)
        masks = [[position >= source for position in range(len(ids))] for _, source, ids in group]
        ragged = Ragged.build(texts, masks, row_ids=[example.row_id for example in examples])
        prefixes = torch.tensor(sources) if prefix_mask else None
        ragged = ragged.with_sources([example.source for example in examples])
        batches.append(replace(ragged, prefix_lengths=prefixes))
    return batches


# Every objective

TOKENIZE_TEXT: dict[Objective, Tokenize] = {
    "causal": tokenize_texts,
    "masked": tokenize_for_corruption,
    "sentence_pairs": tokenize_passages,
    "span_corruption": tokenize_plain,
    "prefix": tokenize_plain,
    "infilling": partial(tokenize_plain, special_tokens=3),
}


def prepare_text(
    config: DataConfig, objective: Objective, tokenizer: Tokenizer, part: Part = "train"
) -> tuple[Rows, Tally]:
    """Token sequences of running text for a pretraining objective, and the whole tally.

    Those of masked are of `corruption_example`, those of sentence_pairs of `passage_of`.
    """
    # A second sentence may come from any other text, so that passages are made of all texts at once.
    whole = objective == "sentence_pairs"
    preparation = Preparation(f"text for {objective}", "text", TOKENIZE_TEXT[objective], whole=whole)
    if config.streaming and part == "train":
        return open_stream(preparation, config, tokenizer)
    return prepare_with(preparation, config, tokenizer, part=part)
