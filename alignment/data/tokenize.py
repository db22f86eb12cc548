"""Records to token sequences of limited length; every drop and cut is counted. Batches are made in batches.py.

Nothing is cached here: ids come from the tokenizer and the rows at hand; prepare.py keeps them.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from typing import Any, TypeVar

from alignment.data.examples import Example, Values
from alignment.data.rows.records import (
    SHOWN_IDS,
    Comparison,
    Demonstration,
    Kind,
    LabeledResponse,
    Message,
    Prompt,
    Ranking,
    Steps,
    Tally,
    Text,
    single_turns,
)
from alignment.data.text import chat
from alignment.data.text.dialogues import DialogueRow, encode_dialogues
from alignment.data.text.truncation import split_document, truncate, truncate_left
from alignment.data.tokenizers.tokenizer import Tokenizer, adds_bos, bos_id, encode
from alignment.errors import UserError, list_problems

PROMPT_CUT = "prompt longer than fits: its beginning cut off"
RESPONSE_CUT = "response longer than fits: its end cut off, with the end token"
TEXT_CUT = "text longer than max_length: cut into successive pieces"
PLAIN_PROMPT = "the prompt is plain text, which never enters the model's chat template; data.as_messages=true makes it the user's message"
EMPTY = "response is nothing but the end token"
EQUAL = "chosen and rejected are the same tokens"
TIED_RANKING = "all responses of the ranking are tied; only a reward model with loss=rao_kupper learns from ties"
EQUAL_IN_RANKING = "responses of a ranking are the same tokens: left out of it"
FEW_RESPONSES = "fewer than two responses of the ranking differ in their tokens"
STEPS_CUT = "steps longer than fit: the last ones left out, with their labels"
NO_STEP = "no whole step fits"

PromptedRow = Demonstration | Comparison | Prompt | LabeledResponse | Ranking | Steps
Encoded = TypeVar("Encoded")
Tokenize = Callable[[list[Any], Tokenizer, int], tuple[list[Any], Tally]]  # records, tokenizer, most tokens of a row


def counted(examples: list[Example], counts: Tally) -> tuple[list[Example], Tally]:
    """Examples, and their tally with the number of their documents and tokens."""
    return examples, counts.with_documents(ids for example in examples for ids in example.documents)


def tokenize_texts(rows: Sequence[Text], tokenizer: Tokenizer, max_length: int) -> tuple[list[Example], Tally]:
    """Documents to model, each at most `max_length` tokens; every token but a text's first is predicted exactly once.

    A longer text is cut into successive pieces. A piece after the first starts with the BOS where the tokenizer has
    one, else with the last token of the piece before: its first new token needs something to be predicted from.
    """
    counts, examples = Tally(rows=len(rows), kept=len(rows)), []
    bos = bos_id(tokenizer) if adds_bos(tokenizer) else None
    for row, ids in zip(rows, chat.texts_ids(tokenizer, [row.text for row in rows]), strict=True):
        if len(ids) > max_length:
            counts.note_cut(TEXT_CUT, row.row_id)
        pieces = split_document(ids, max_length, bos)
        examples += [Example.single(piece, [True] * len(piece), row.row_id) for piece in pieces]
    return counted(examples, counts)


def tokenize_demonstrations(
    rows: Sequence[Demonstration], tokenizer: Tokenizer, max_length: int
) -> tuple[list[Example], Tally]:
    """Prompt and response joined; the response and its end token count, in dialogues every assistant turn.

    Raises:
        UserError: the chat template is missing or refuses rows; all refusals at once.
    """
    counts, examples = Tally(rows=len(rows)), []
    bos = bos_id(tokenizer)
    turns = [[] if row.messages and not row.apart else single_turns(row) for row in rows]
    flat = [turn for each in turns for turn in each]
    answered = zip(
        encode_prompts(tokenizer, [row for row, _ in flat], counts), _responses(tokenizer, flat, counts), strict=True
    )
    whole = iter(_dialogues(tokenizer, [row for row in rows if row.messages and not row.apart], counts))
    for row, of_row in zip(rows, turns, strict=True):
        if row.messages and not row.apart:
            ids, mask = next(whole)
            start = last_span(mask)
            made = [(ids[:start], mask[:start], ids[start:])]
        else:
            made = [(head, [False] * len(head), tail) for head, tail in islice(answered, len(of_row))]
        made = [(head, mask, tail) for head, mask, tail in made if len(tail) >= 2]
        if not made:
            counts.drop(EMPTY, row.row_id)
            continue
        counts.kept += 1
        for head, mask, tail in made:
            kept_head, [kept_tail] = truncate(head, [tail], max_length, bos)
            _note_cuts(counts, row.row_id, len(head) > len(kept_head), len(tail) > len(kept_tail))
            kept_mask = truncate_left(mask, len(kept_head), head[:1] == [bos]) + [True] * len(kept_tail)
            examples.append(Example.single(kept_head + kept_tail, kept_mask, row.row_id))
    return counted(examples, counts)


def tokenize_comparisons(
    rows: Sequence[Comparison], tokenizer: Tokenizer, max_length: int
) -> tuple[list[Example], Tally]:
    """Both responses after the very same prompt tokens; pairs whose tokens are equal in the end are dropped."""
    replies = [row.messages or (row.chosen, row.rejected) for row in rows]
    ranks, values = [(0, 1)] * len(rows), [margin_of(row) for row in rows]
    return _tokenize_judged(rows, replies, tokenizer, max_length, ranks=ranks, values=values)


def tokenize_labels(
    rows: Sequence[LabeledResponse], tokenizer: Tokenizer, max_length: int
) -> tuple[list[Example], Tally]:
    """Prompt and response joined, as in demonstrations of one turn, with the label."""
    replies, values = [(row.response,) for row in rows], [{"desirable": row.desirable} for row in rows]
    return _tokenize_judged(rows, replies, tokenizer, max_length, ranks=[(0,)] * len(rows), values=values)


def tokenize_rankings(rows: Sequence[Ranking], tokenizer: Tokenizer, max_length: int) -> tuple[list[Example], Tally]:
    """All responses of a row after the very same prompt tokens, each cut to what the prompt leaves of `max_length`.

    Of responses that are the same tokens in the end, one stays where they tie; where they do not, none does, since the
    ranking contradicts itself. A ranking with fewer than two responses left is dropped.
    """
    replies, ranks = [row.responses for row in rows], [row.ranks for row in rows]
    values = [margin_of(row) for row in rows]
    return _tokenize_judged(rows, replies, tokenizer, max_length, ranks=ranks, values=values, ranked=True)


def _tokenize_judged(
    rows: Sequence[PromptedRow],
    replies: Sequence[Sequence[str | Message]],
    tokenizer: Tokenizer,
    max_length: int,
    *,
    ranks: Sequence[Sequence[int]],
    values: Sequence[Values],
    ranked: bool = False,
) -> tuple[list[Example], Tally]:
    """Each row's prompt with its replies; see `tokenize_rankings`.

    Args:
        replies: of each row.
        ranks: of each row's replies, 0 is best.
        values: of each row's example.
        ranked: the ranks of the replies that are kept are among its values.
    """
    counts, examples = Tally(rows=len(rows)), []
    prompts = encode_prompts(tokenizer, rows, counts)
    flat = [(row, reply) for row, of_row in zip(rows, replies, strict=True) for reply in of_row]
    encoded = iter(_responses(tokenizer, flat, counts))
    for row, head, row_ranks, known in zip(rows, prompts, ranks, values, strict=True):
        whole = [next(encoded) for _ in row_ranks]
        kept_head, tails = truncate(head, whole, max_length, bos_id(tokenizer))
        kept = _distinct(tails, row_ranks)
        if min(map(len, whole)) < 2:
            counts.drop(EMPTY, row.row_id)
        elif len(kept) < min(2, len(whole)):
            counts.drop(EQUAL if len(whole) == 2 else FEW_RESPONSES, row.row_id)
        else:
            if len(kept) < len(tails):
                counts.note_cut(EQUAL_IN_RANKING, row.row_id)
            _note_cuts(counts, row.row_id, len(head) > len(kept_head), max(map(len, whole)) > max(map(len, tails)))
            distinct = sorted({row_ranks[index] for index in kept})
            order = {"ranks": [distinct.index(row_ranks[index]) for index in kept]} if ranked else {}
            tails = [tails[index] for index in kept]
            examples.append(Example.answered(kept_head, tails, row.row_id, **order, **known))
    counts.kept = len(examples)
    return counted(examples, counts)


def margin_of(row: Comparison | Ranking) -> Values:
    """The margin of a row as a value of its example, where it has one."""
    return {} if row.margin is None else {"margin": row.margin}


def _distinct(responses: Sequence[list[int]], ranks: Sequence[int]) -> list[int]:
    """Indices of the responses to keep: one of those that are equal and tie, none of those that are equal and do not."""
    found: dict[tuple[int, ...], list[int]] = {}
    for index, ids in enumerate(responses):
        found.setdefault(tuple(ids), []).append(index)
    return [same[0] for same in found.values() if len({ranks[index] for index in same}) == 1]


def tokenize_ordered_rankings(
    rows: Sequence[Ranking], tokenizer: Tokenizer, max_length: int
) -> tuple[list[Example], Tally]:
    """`tokenize_rankings` without those whose responses are all tied."""
    return ordered_only(*tokenize_rankings(rows, tokenizer, max_length))


def ordered_only(examples: list[Example], counts: Tally) -> tuple[list[Example], Tally]:
    """Rankings in which a response is better than another; what all of them tie in says nothing about an order."""
    kept = [example for example in examples if len(set(example.values["ranks"])) > 1]
    for example in examples:
        if len(set(example.values["ranks"])) == 1:
            counts.drop(TIED_RANKING, example.row_id)
    counts.kept = len(kept)
    return counted(kept, counts)


def tokenize_steps(rows: Sequence[Steps], tokenizer: Tokenizer, max_length: int) -> tuple[list[Example], Tally]:
    """Prompt and steps joined, each step followed by its row's separator, whose last token carries the step's label.

    The prompt gives way first, from its beginning, as for other responses. A step that does not fit whole is left out
    with its label, as are those after it. No end token: a solution may stop after any step.

    Source: Uesato et al. 2022, arXiv:2211.14275; the layout of tokens is trl's stepwise supervision.
    """
    counts, examples = Tally(rows=len(rows)), []
    prompts = encode_prompts(tokenizer, rows, counts)
    encoded = iter(encode(tokenizer, [text for row in rows for text in row.steps], follows=True))
    separators = {text: encode(tokenizer, [text], follows=True)[0] for text in {row.separator for row in rows}}
    for row, head in zip(rows, prompts, strict=True):
        steps = [next(encoded) + separators[row.separator] for _ in row.steps]
        ends = list(accumulate(map(len, steps)))
        kept_head, [response] = truncate(
            head, [[token for step in steps for token in step]], max_length, bos_id(tokenizer)
        )
        whole = sum(end <= len(response) for end in ends)
        if not whole:
            counts.drop(NO_STEP, row.row_id)
            continue
        if whole < len(steps):
            counts.note_cut(STEPS_CUT, row.row_id)
        _note_cuts(counts, row.row_id, len(head) > len(kept_head), False)
        values = {"ends": [len(kept_head) + end - 1 for end in ends[:whole]], "labels": list(row.labels[:whole])}
        ids = kept_head + response[: ends[whole - 1]]
        examples.append(Example.single(ids, [False] * len(ids), row.row_id, **values))
    counts.kept = len(examples)
    return counted(examples, counts)


def tokenize_prompts(rows: Sequence[Prompt], tokenizer: Tokenizer, max_length: int) -> tuple[list[Example], Tally]:
    """Prompts of at most `max_length` tokens, longer ones without their beginning (the BOS stays)."""
    counts, examples = Tally(rows=len(rows), kept=len(rows)), []
    for row, ids in zip(rows, encode_prompts(tokenizer, rows, counts), strict=True):
        kept = truncate_left(ids, max_length, ids[:1] == [bos_id(tokenizer)])
        cut = len(ids) > len(kept)
        _note_cuts(counts, row.row_id, cut, False)
        values = {"prompt": row.prompt, "extra": row.extra, "cut": cut}
        examples.append(Example.single(kept, [False] * len(kept), row.row_id, **values))
    return counted(examples, counts)


TOKENIZE: dict[Kind, Tokenize] = {
    "text": tokenize_texts,
    "demonstrations": tokenize_demonstrations,
    "comparisons": tokenize_comparisons,
    "prompts": tokenize_prompts,
    "labels": tokenize_labels,
    "rankings": tokenize_rankings,
    "steps": tokenize_steps,
}


def encode_prompts(tokenizer: Tokenizer, rows: Sequence[PromptedRow], counts: Tally | None = None) -> list[list[int]]:
    """Prompt ids of each row, texts and messages each in one go; texts beside a chat template are noted.

    Raises:
        UserError: the chat template is missing or refuses rows; all refusals at once.
    """
    if counts is not None and tokenizer.chat_template is not None:
        plain = [row for row in rows if isinstance(row.prompt, str)]
        _note(counts, plain, [[PLAIN_PROMPT]] * len(plain))
    encoded = chat.encode_each_prompt(tokenizer, [row.prompt for row in rows], [row.tools for row in rows])
    return _accepted(rows, encoded)


def _responses(
    tokenizer: Tokenizer, replies: Sequence[tuple[PromptedRow, str | Message]], counts: Tally
) -> list[list[int]]:
    """Ids of each reply to its row's prompt; their notes are counted."""
    rows = [row for row, _ in replies]
    encoded = chat.encode_each_response(
        tokenizer, [reply for _, reply in replies], [row.prompt for row in rows], tools=[row.tools for row in rows]
    )
    accepted = _accepted(rows, encoded)
    _note(counts, rows, [each.notes for each in accepted])
    return [each.ids for each in accepted]


def _dialogues(
    tokenizer: Tokenizer, rows: Sequence[Demonstration], counts: Tally
) -> list[tuple[list[int], list[bool]]]:
    """Ids and mask of each row's dialogue; their notes are counted."""
    dialogues = [DialogueRow(row.messages or [], row.trained, row.tools) for row in rows]
    accepted = _accepted(rows, encode_dialogues(tokenizer, dialogues))
    _note(counts, rows, [each.notes for each in accepted])
    return [(each.ids, each.mask) for each in accepted]


def _accepted(rows: Sequence[PromptedRow], encoded: Sequence[Encoded | UserError]) -> list[Encoded]:
    """The results; refusals are reported for all rows at once, the same refusal once with its rows."""
    done: list[Encoded] = []
    refused: dict[str, list[str]] = {}
    for row, result in zip(rows, encoded, strict=True):
        if isinstance(result, UserError):
            refused.setdefault(str(result), []).append(row.row_id)
        else:
            done.append(result)
    if refused:
        raise RefusedRows(refused)
    return done


def _note(counts: Tally, rows: Sequence[PromptedRow], notes: Sequence[Sequence[str]]) -> None:
    for row, of_row in zip(rows, notes, strict=True):
        for note in of_row:
            counts.note(note, row.row_id)


class RefusedRows(UserError):
    """Rows that the chat template refuses: `refused` has their names by what it says."""

    def __init__(self, refused: dict[str, list[str]]):
        self.refused = refused
        super().__init__(list_problems(f"{names[0]}: {why}{_more(names[1:])}" for why, names in refused.items()))


def _more(row_ids: Sequence[str]) -> str:
    """That other rows share a fault, and the names of the first few."""
    shown = ", ".join(row_ids[: SHOWN_IDS - 1]) + (", ..." if len(row_ids) >= SHOWN_IDS else "")
    return f" (likewise {len(row_ids)} more: {shown})" if row_ids else ""


def last_span(mask: Sequence[bool]) -> int:
    """Begin of the last unbroken run of True, in a mask that ends with True."""
    return max((index + 1 for index, counts in enumerate(mask) if not counts), default=0)


def _note_cuts(counts: Tally, row_id: str, prompt: bool, response: bool) -> None:
    if prompt:
        counts.note_cut(PROMPT_CUT, row_id)
    if response:
        counts.note_cut(RESPONSE_CUT, row_id)
