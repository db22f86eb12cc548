"""Batches without padding: documents end to end in one tensor. Training needs of any batch what `Batch` has.

Last, of the devices that they are moved to, what some of them lack.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import Protocol, TypeVar

import torch
from torch import Tensor

# True: the documents of one prompt share its computation; False: never; a function: where it says so of their lengths.
Sharing = bool | Callable[[Sequence[int]], bool]

Row = TypeVar("Row")
Self = TypeVar("Self")
Moved = TypeVar("Moved", bound="DeviceBatch")


class Batch(Protocol):
    """A micro-batch, as the training engine sees it.

    Attributes:
        weight: of the batch in the mean of its term (tokens, pairs, ...), over this batch alone.
        lengths: tokens of each document that the model reads.
        row_ids: name of the data row behind each document, for messages; may be empty.
    """

    @property
    def weight(self) -> float: ...
    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def row_ids(self) -> tuple[str, ...]: ...
    def to(self: Self, device: torch.device | str) -> Self: ...


@dataclass(frozen=True)
class DeviceBatch:
    """Base of the batch classes: moves all tensors among the fields to a device."""

    def to(self: Moved, device: torch.device | str) -> Moved:
        """A copy on `device`; the batch itself where every tensor is there already."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        held = {name: value for name, value in held.items() if isinstance(value, Tensor | DeviceBatch)}
        moved = {
            name: value.to(device) if isinstance(value, DeviceBatch) else value.to(device, non_blocking=True)
            for name, value in held.items()
        }
        return self if all(moved[name] is held[name] for name in held) else replace(self, **moved)


@dataclass(frozen=True)
class SharedPrompts(DeviceBatch):
    """Prompts that stand once in a batch and begin several of its documents."""

    lengths: tuple[int, ...]  # tokens of each prompt; those that begin the most documents come first, [P]
    of_documents: tuple[int | None, ...]  # prompt of each document; None: the document shares nothing, [B]
    documents: Tensor  # index of each token of each whole document, documents end to end, [S]
    before: Tensor  # index of the token that predicts each target, [M]
    repeated: Tensor  # targets that a prompt's last token predicts, as it does others, [at most B]

    @cached_property
    def of_each(self) -> tuple[int, ...]:
        """Tokens of each document that are its prompt's, [B]."""
        return tuple(0 if prompt is None else self.lengths[prompt] for prompt in self.of_documents)


@dataclass(frozen=True)
class Ragged(DeviceBatch):
    """Tokens of B documents lying end to end, N in all, of which M are predictions that count.

    With `shared` the tokens of the shared prompts come first, each prompt once; then, document by document, the tokens
    that each has to itself. `lengths`, `last`, `firsts` and `target_rows` speak of whole documents all the same.

    Attributes:
        tokens: token ids, [N].
        positions: position of each token in its own document, from 0, [N].
        starts: index of each document's first token (of those it has to itself), then N; int32 as variable-length
            kernels want it, [B + 1].
        lengths: tokens of each document, as plain numbers, so that no shape has to be fetched from a device.
        target_index: indices into `tokens` of the tokens to predict, [M]; a document's first token only in masked text.
        target_rows: document of each target, [M].
        weight: of the batch in the mean of its term (tokens, pairs, ...), over this batch alone.
        row_ids: name of the data row behind each document, for messages.
        labels: ids to predict at the targets, where they differ from `tokens` (masked text), [M].
        segments: sentence of a pair that each token belongs to, 0 or 1, [N].
        global_mask: tokens that see, and are seen by, all of their document (Longformer), [N]; None: as the model
            chooses.
        shared: prompts that begin several documents; None: every document stands for itself.
        sources: number of the data source of each document, where sources are reported separately, [B].
        prefix_lengths: first tokens of each document that a decoder reads in both directions (prefix LM), [B]; None: no
            token sees what follows it.
    """

    tokens: Tensor
    positions: Tensor
    starts: Tensor
    lengths: tuple[int, ...]
    target_index: Tensor
    target_rows: Tensor
    weight: float
    row_ids: tuple[str, ...] = ()
    labels: Tensor | None = None
    segments: Tensor | None = None
    global_mask: Tensor | None = None
    shared: SharedPrompts | None = None
    sources: Tensor | None = None
    prefix_lengths: Tensor | None = None

    @classmethod
    def build(
        cls,
        documents: Sequence[Sequence[int]],
        target_masks: Sequence[Sequence[bool]] | None = None,
        *,
        weight: float | None = None,
        row_ids: Sequence[str] = (),
        segments: Sequence[Sequence[int]] = (),
    ) -> "Ragged":
        """Lay documents of at least one token end to end.

        Args:
            target_masks: True where a token is a prediction that counts; None: every token but each first one.
            weight: None: the number of targets.
            segments: sentence of each token, document by document; the batch has none where all are 0.
        """
        lengths = tuple(len(document) for document in documents)
        if not lengths or min(lengths) == 0:
            raise ValueError("a ragged batch needs at least one document, and no empty one")
        size = torch.tensor(lengths)
        starts = torch.cat([torch.zeros(1, dtype=torch.long), size.cumsum(0)])
        rows = torch.repeat_interleave(torch.arange(len(lengths)), size)
        positions = torch.arange(int(starts[-1])) - starts[rows]
        counts = positions > 0
        if target_masks is not None:
            counts &= torch.tensor([flag for mask in target_masks for flag in mask], dtype=torch.bool)
        targets = counts.nonzero().squeeze(1)
        sentences = [sentence for document in segments for sentence in document]
        return cls(
            tokens=torch.tensor([token for document in documents for token in document], dtype=torch.long),
            positions=positions,
            starts=starts.to(torch.int32),
            lengths=lengths,
            target_index=targets,
            target_rows=rows[targets],
            weight=float(len(targets)) if weight is None else float(weight),
            row_ids=tuple(row_ids),
            segments=torch.tensor(sentences) if any(sentences) else None,
        )

    @classmethod
    def build_shared(
        cls,
        documents: Sequence[Sequence[int]],
        target_masks: Sequence[Sequence[bool]],
        groups: Sequence[Sequence[int]],
        *,
        weight: float | None = None,
        row_ids: Sequence[str] = (),
        share: Sharing = True,
    ) -> "Ragged":
        """Lay documents end to end, what those of a group begin with (no targets) only once; see `common_prompt`.

        Args:
            groups: numbers of the documents that may share their beginning; no document is in two groups.
            share: which groups share, by the lengths of their documents.
        """
        prompts: list[int] = []
        first_of: list[int] = []  # a document of each prompt
        of_documents: list[int | None] = [None] * len(documents)
        for group in sorted(groups, key=len, reverse=True):  # see `SharedPrompts.lengths`
            if not allowed(share, [len(documents[i]) for i in group]):
                continue
            if common := common_prompt([documents[i] for i in group], [target_masks[i] for i in group]):
                for i in group:
                    of_documents[i] = len(prompts)
                prompts.append(common)
                first_of.append(group[0])
        whole = cls.build(documents, target_masks, weight=weight, row_ids=row_ids)
        return _share(whole, prompts, first_of, of_documents) if prompts else whole

    @cached_property
    def before(self) -> Tensor:
        """Index of the token that predicts each target, the one before it in its document, [M]."""
        return self.target_index - 1 if self.shared is None else self.shared.before

    @property
    def target_labels(self) -> Tensor:
        """Ids to predict at the targets, [M]."""
        return self.tokens[self.target_index] if self.labels is None else self.labels

    def with_sources(self, numbers: Sequence[int]) -> "Ragged":
        """The batch with the number of each document's data source."""
        return replace(self, sources=torch.tensor(numbers, dtype=torch.long))

    @property
    def counted_sources(self) -> Tensor | None:
        """Data source of each thing that the weight counts, here of each target, [M]."""
        return None if self.sources is None else self.sources[self.target_rows]

    @cached_property
    def firsts(self) -> Tensor:
        """Index of each document's first token, [B]."""
        if self.shared is None:
            return self.starts[:-1].long()
        return self.shared.documents[self.sizes.cumsum(0) - self.sizes]

    @cached_property
    def last(self) -> Tensor:
        """Index of each document's last token, [B]."""
        return self.starts[1:].long() - 1

    @cached_property
    def sizes(self) -> Tensor:
        """Tokens of each document, on the device of the tokens, [B]."""
        if self.shared is None:
            return self.starts.long().diff()
        return torch.tensor(self.lengths).to(self.tokens.device, non_blocking=True)

    @property
    def in_prefix(self) -> Tensor | None:
        """True for the tokens of `prefix_lengths`, [N]; None where there are none."""
        if self.prefix_lengths is None:
            return None
        return self.positions < self.prefix_lengths.repeat_interleave(self.sizes, output_size=len(self.tokens))

    @property
    def pieces(self) -> tuple[int, ...]:
        """Tokens of each piece that lies in one run: the shared prompts, then what each document has to itself."""
        if self.shared is None:
            return self.lengths
        own_lengths = tuple(length - prompt for length, prompt in zip(self.lengths, self.shared.of_each, strict=True))
        return (*self.shared.lengths, *own_lengths)


def refuse_shared(batch: Ragged, what: str) -> None:
    """Raise ValueError where a batch has shared prompts and `what` computes whole documents only."""
    if batch.shared is not None:
        raise ValueError(f"{what} takes no shared prompts; build the batch without them")


def allowed(share: Sharing, lengths: Sequence[int]) -> bool:
    """True where documents with these lengths, whole, share their prompt."""
    return len(lengths) > 1 and (share if isinstance(share, bool) else share(lengths))


def common_prompt(documents: Sequence[Sequence[int]], target_masks: Sequence[Sequence[bool]]) -> int:
    """Leading tokens that are the same in all documents and no target; at least one token of each is left over."""
    before_targets = [1 + [*mask[1:], True].index(True) for mask in target_masks]  # a first token is never a target
    limit = min(*before_targets, *(len(document) - 1 for document in documents))
    first = list(documents[0][:limit])
    for document in documents[1:]:
        other = list(document[: len(first)])
        if other != first:
            first = first[: next(i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)]
    return len(first)


def _share(
    whole: Ragged, prompts: Sequence[int], first_of: Sequence[int], of_documents: Sequence[int | None]
) -> Ragged:
    """The batch with each shared prompt, of `prompts` tokens, once; `first_of` is a document that begins with it."""
    ends = list(accumulate(whole.lengths))
    own_lengths = [
        length - (0 if p is None else prompts[p]) for length, p in zip(whole.lengths, of_documents, strict=True)
    ]
    firsts = [ends[i] - whole.lengths[i] for i in first_of] + [
        end - size for end, size in zip(ends, own_lengths, strict=True)
    ]
    kept = runs(firsts, [*prompts, *own_lengths])
    documents = document_tokens(prompts, of_documents, whole.lengths)
    starts = torch.tensor([0, *accumulate(own_lengths)]) + sum(prompts)
    before = documents[whole.target_index - 1]
    repeated = (before < sum(prompts)).nonzero().squeeze(1)
    return replace(
        whole,
        tokens=whole.tokens[kept],
        positions=whole.positions[kept],
        starts=starts.to(torch.int32),
        target_index=documents[whole.target_index],
        shared=SharedPrompts(tuple(prompts), tuple(of_documents), documents, before, repeated),
    )


def runs(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """start, start + 1, ... of each run, `length` numbers each, end to end, [sum of lengths]."""
    size = torch.tensor(lengths)
    shifts = torch.tensor(starts) - (size.cumsum(0) - size)
    total = sum(lengths)
    return torch.arange(total) + torch.repeat_interleave(shifts, size, output_size=total)


def document_tokens(prompts: Sequence[int], of_documents: Sequence[int | None], lengths: Sequence[int]) -> Tensor:
    """`SharedPrompts.documents`: where the tokens of each whole document lie, [sum of lengths]."""
    prompt_starts = [0, *accumulate(prompts)]
    start = prompt_starts[-1]
    starts = []
    sizes = []
    for prompt, length in zip(of_documents, lengths, strict=True):
        before = 0 if prompt is None else prompts[prompt]
        starts += [0 if prompt is None else prompt_starts[prompt], start]
        sizes += [before, length - before]
        start += length - before
    return runs(starts, sizes)


@dataclass(frozen=True)
class RaggedBatch(DeviceBatch):
    """Base of the batches that carry more than tokens; a `Batch`."""

    ragged: Ragged

    @property
    def weight(self) -> float:
        return self.ragged.weight

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.ragged.lengths

    @property
    def row_ids(self) -> tuple[str, ...]:
        return self.ragged.row_ids

    @property
    def counted_sources(self) -> Tensor | None:
        """Data source of each thing that the weight counts, here of each document, [B]."""
        return self.ragged.sources


@dataclass(frozen=True)
class Seq2Seq(DeviceBatch):
    """Documents for an encoder, and for each the decoder's, which begins with its start token, no target; a `Batch`."""

    encoder: Ragged
    decoder: Ragged

    @property
    def weight(self) -> float:
        return self.decoder.weight

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(map(add, self.encoder.lengths, self.decoder.lengths))

    @property
    def row_ids(self) -> tuple[str, ...]:
        return self.decoder.row_ids

    @property
    def sources(self) -> Tensor | None:
        return self.decoder.sources

    @property
    def target_rows(self) -> Tensor:
        return self.decoder.target_rows

    @property
    def counted_sources(self) -> Tensor | None:
        return self.decoder.counted_sources


def cut_at_targets(batch: Ragged, start_token: int) -> Seq2Seq:
    """Documents that end in their targets, as prompts for an encoder and `start_token` with the targets for a decoder.

    The weight stays; no prompt of the batch is shared, and none is empty.
    """
    sources = list[list[int]]()
    targets = list[list[int]]()
    counts = torch.bincount(batch.target_rows, minlength=len(batch.lengths)).tolist()
    for document, count in zip(batch.tokens.split(list(batch.lengths)), counts, strict=True):
        prompt, response = document.split([len(document) - count, count])
        sources.append(prompt.tolist())
        targets.append([start_token, *response.tolist()])
    decoder = Ragged.build(targets, weight=batch.weight, row_ids=batch.row_ids)
    nothing = [[False] * len(source) for source in sources]
    return Seq2Seq(Ragged.build(sources, nothing, row_ids=batch.row_ids), replace(decoder, sources=batch.sources))


def with_virtual_tokens(batch: Ragged, count: int | Sequence[int]) -> tuple[Ragged, Tensor, Tensor]:
    """The documents with `count` more tokens before each, or a count of their own, for vectors that are no tokens'.

    A shared prompt has them once for its documents, which need the same count; targets stay the same tokens.

    Returns:
        The longer documents; the indices of their own tokens, [N]; those of the virtual ones, document by document.
    """
    shared = batch.shared
    device = batch.tokens.device
    pieces = batch.pieces
    counts = [count] * len(batch.lengths) if isinstance(count, int) else list(count)
    lengths = tuple(length + more for length, more in zip(batch.lengths, counts, strict=True))
    # of each piece: its virtual tokens, the position of its first token
    added = counts
    places = [0] * len(pieces)
    prompts = 0
    most = counts[0]
    if shared is not None:
        if len(set(counts)) > 1:
            raise ValueError(
                "documents with shared prompts need equally many virtual tokens; build the batch without them"
            )
        prompts = len(shared.lengths)
        added = [most] * prompts + [most * (prompt is None) for prompt in shared.of_documents]
        places = [0] * prompts + [before and before + most for before in shared.of_each]
    sizes = [size + more for size, more in zip(pieces, added, strict=True)]
    starts = [0, *accumulate(sizes)]
    own_tokens = runs([start + more for start, more in zip(starts[:-1], added, strict=True)], pieces)
    own_tokens = own_tokens.to(device, non_blocking=True)

    def longer(x: Tensor) -> Tensor:
        return x.new_zeros(starts[-1]).index_copy(0, own_tokens, x)

    if shared is not None:
        longer_prompts = tuple(length + most for length in shared.lengths)
        documents = document_tokens(longer_prompts, shared.of_documents, lengths)
        documents = documents.to(device, non_blocking=True)
        shared = replace(shared, lengths=longer_prompts, documents=documents, before=own_tokens[shared.before])
    expanded = replace(
        batch,
        tokens=longer(batch.tokens),
        positions=runs(places, sizes).to(device, non_blocking=True),
        starts=torch.tensor(starts[prompts:], dtype=batch.starts.dtype).to(device, non_blocking=True),
        lengths=lengths,
        target_index=own_tokens[batch.target_index],
        segments=None if batch.segments is None else longer(batch.segments),
        global_mask=None if batch.global_mask is None else longer(batch.global_mask),
        shared=shared,
        prefix_lengths=None
        if batch.prefix_lengths is None
        else batch.prefix_lengths + torch.tensor(counts, device=device),
    )
    return expanded, own_tokens, runs(starts[:-1], added).to(device, non_blocking=True)


def group_by_length(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Row numbers in groups of similar length, short to long, each of at most `limit` tokens; a longer row is alone."""
    return fill_groups(sorted(range(len(lengths)), key=lambda row: lengths[row]), lengths, limit)


def group_rows_by_length(rows: Sequence[Row], lengths: Sequence[int], limit: int) -> list[list[Row]]:
    """The rows themselves in the groups of `group_by_length`, the longest group first, where memory peaks."""
    return [[rows[index] for index in group] for group in reversed(group_by_length(lengths, limit))]


def fill_groups(order: Sequence[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Row numbers in the given order, cut into groups before their tokens exceed `limit`."""
    groups: list[list[int]] = []
    filled = 0
    for row in order:
        if not groups or filled + lengths[row] > limit:
            groups.append([])
            filled = 0
        groups[-1].append(row)
        filled += lengths[row]
    return groups


# Devices


def has_apple_gpu() -> bool:
    """True where models run on an Apple GPU: there is one, torch can use it, and ACCELERATE_USE_CPU is not set."""
    unwanted = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on", "y", "t")
    return torch.backends.mps.is_available() and not torch.cuda.is_available() and not unwanted


def has_bfloat16() -> bool | None:
    """True where the CPU has instructions for bfloat16 (AVX-512 BF16, AMX, Arm's BF16); None: torch cannot tell.

    oneDNN's own question whether it supports bfloat16 is answered with yes by CPUs that only emulate it.
    """
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    flags = [has for name, has in capabilities.items() if "bf16" in name]
    return any(flags) if flags else None


def on_float64_device(values: Tensor) -> Tensor:
    """The values, on the CPU where their device has no float64."""
    return values.cpu() if values.device.type == "mps" else values
