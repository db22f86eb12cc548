"""Records to token sequences of limited length; every drop and cut is counted. Batches are made in batches.py.

Nothing is cached here: ids come from the tokenizer and the rows at hand; prepare.py keeps them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, compress, islice, pairwise
from typing import Any, NamedTuple, TypeVar

from alignment.data.batches import Example, Values
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
    replies_of,
    single_turns,
)
from alignment.data.text import chat
from alignment.data.text.chat import EncodedChat, encode_dialogues
from alignment.data.text.templates import Piece, encode_pieces, shared_length
from alignment.data.tokenizers.tokenizer import ANCHOR, Tokenizer, adds_bos, encode
from alignment.errors import UserError, list_problems

PROMPT_CUT = "prompt longer than fits: its beginning cut off"
RESPONSE_CUT = "response longer than fits: its end cut off, with the end token"
TEXT_CUT = "text longer than max_length: cut into successive pieces"
PLAIN_PROMPT = (
    "the prompt is plain text, which never enters the model's chat template; data.as_messages=true makes it the user's "
    "message"
)
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


class Sides(NamedTuple):
    """Functions that give the ids of the two sides of rows, to be joined or to be read by two stacks."""

    prompts: Callable[[Tokenizer, Sequence[PromptedRow], Tally], list[list[int]]]
    responses: Callable[[Tokenizer, Sequence[tuple[PromptedRow, str | Message]], Tally], list[EncodedChat]]


def counted(examples: list[Example], counts: Tally) -> tuple[list[Example], Tally]:
    """Examples, and their tally with the number of their documents and tokens."""
    return examples, counts.with_documents(ids for example in examples for ids in example.documents)


def tokenize_texts(rows: Sequence[Text], tokenizer: Tokenizer, max_length: int) -> tuple[list[Example], Tally]:
    """Documents to model, each at most `max_length` tokens; every token but a text's first is predicted exactly once.

    A longer text is cut into successive pieces. A piece after the first starts with the BOS where the tokenizer has
    one, else with the last token of the piece before: its first new token needs something to be predicted from.
    """
    counts = Tally(rows=len(rows))
    examples = []
    bos = tokenizer.bos_token_id if adds_bos(tokenizer) else None
    for row, ids in zip(rows, chat.texts_ids(tokenizer, [row.text for row in rows]), strict=True):
        if len(ids) > max_length:
            counts.note_cut(TEXT_CUT, row.row_id)
        later = [
            [ids[start - 1] if bos is None else bos, *ids[start : start + max_length - 1]]
            for start in range(max_length, len(ids), max_length - 1)
        ]
        examples += [Example.single(piece, [True] * len(piece), row.row_id) for piece in [ids[:max_length], *later]]
    return counted(examples, counts)


def tokenize_demonstrations(
    rows: Sequence[Demonstration], tokenizer: Tokenizer, max_length: int, sides: Sides | None = None
) -> tuple[list[Example], Tally]:
    """Prompt and response joined; the response and its end token count, in dialogues every assistant turn.

    With `sides`, of a model that reads prompts apart from responses, each turn of a dialogue is an example.

    Raises:
        UserError: the chat template is missing or refuses rows; all refusals at once.
    """
    counts = Tally(rows=len(rows))
    examples = []
    bos = tokenizer.bos_token_id
    prompts, responses = sides or DECODER
    is_whole = [bool(row.messages) and not row.apart and sides is None for row in rows]
    turns = [[] if together else single_turns(row) for row, together in zip(rows, is_whole, strict=True)]
    flat = [turn for row_turns in turns for turn in row_turns]
    heads = prompts(tokenizer, [row for row, _ in flat], counts)
    answered = zip(heads, responses(tokenizer, flat, counts), strict=True)
    dialogues = list(compress(rows, is_whole))
    whole = iter(_accepted(dialogues, encode_dialogues(tokenizer, dialogues), counts))
    for row, of_row, together in zip(rows, turns, is_whole, strict=True):
        if together:
            dialogue = next(whole)
            start = last_span(dialogue.mask)
            made = [(dialogue.ids[:start], dialogue.mask[:start], dialogue.ids[start:])]
        else:
            made = []
            for prompt, response in islice(answered, len(of_row)):
                head, [tail] = after_one_prompt(prompt, [response])
                made.append((head, [False] * len(head), tail))
        made = [(head, mask, tail) for head, mask, tail in made if len(tail) >= 2]
        if not made:
            counts.drop(EMPTY, row.row_id)
            continue
        heads_cut = tails_cut = False
        for head, mask, tail in made:
            kept_head, [kept_tail] = truncate(head, [tail], max_length, bos)
            heads_cut |= len(head) > len(kept_head)
            tails_cut |= len(tail) > len(kept_tail)
            kept_mask = truncate_left(mask, len(kept_head), head[:1] == [bos]) + [True] * len(kept_tail)
            examples.append(Example.single(kept_head + kept_tail, kept_mask, row.row_id))
        note_cuts(counts, row.row_id, heads_cut, tails_cut)  # once, however many turns stand apart
    return counted(examples, counts)


def tokenize_responses(
    rows: Sequence[Comparison | LabeledResponse | Ranking],
    tokenizer: Tokenizer,
    max_length: int,
    ordered: bool = False,
    sides: Sides | None = None,
) -> tuple[list[Example], Tally]:
    """All responses of a row after the very same prompt tokens, each cut to what the prompt leaves of `max_length`.

    Of responses that are the same tokens in the end, one stays where they tie; where they do not, none does, since the
    judgment contradicts itself. A pair with one response left, or a ranking with fewer than two, is dropped; `ordered`:
    also a ranking whose responses all tie, which says nothing about an order.
    """
    counts = Tally(rows=len(rows))
    examples = []
    of_prompts, of_responses = sides or DECODER
    prompts = of_prompts(tokenizer, rows, counts)
    replies = [getattr(row, "messages", None) or replies_of(row) for row in rows]
    flat = [(row, reply) for row, of_row in zip(rows, replies, strict=True) for reply in of_row]
    encoded = iter(of_responses(tokenizer, flat, counts))
    for row, head, of_row in zip(rows, prompts, replies, strict=True):
        head, whole = after_one_prompt(head, [next(encoded) for _ in of_row])
        kept_head, tails = truncate(head, whole, max_length, tokenizer.bos_token_id)
        ranks = row.ranks if isinstance(row, Ranking) else range(len(whole))
        kept = _distinct(tails, ranks)
        if min(map(len, whole)) < 2:
            counts.drop(EMPTY, row.row_id)
        elif len(kept) < min(2, len(whole)):
            counts.drop(EQUAL if len(whole) == 2 else FEW_RESPONSES, row.row_id)
        elif ordered and len({ranks[index] for index in kept}) == 1:
            counts.drop(TIED_RANKING, row.row_id)
        else:
            if len(kept) < len(tails):
                counts.note_cut(EQUAL_IN_RANKING, row.row_id)
            note_cuts(counts, row.row_id, len(head) > len(kept_head), max(map(len, whole)) > max(map(len, tails)))
            tails = [tails[index] for index in kept]
            examples.append(Example.answered(kept_head, tails, row.row_id, **label_values(row, kept)))
    return counted(examples, counts)


tokenize_comparisons = tokenize_labels = tokenize_rankings = tokenize_responses  # a record says how it is judged


def tokenize_ordered_rankings(
    rows: Sequence[Ranking], tokenizer: Tokenizer, max_length: int
) -> tuple[list[Example], Tally]:
    """`tokenize_rankings` without those whose responses are all tied."""
    return tokenize_rankings(rows, tokenizer, max_length, ordered=True)


def label_values(row: Comparison | LabeledResponse | Ranking, kept: Sequence[int]) -> Values:
    """The values of a row's example, of which these responses are kept."""
    if isinstance(row, LabeledResponse):
        return {"desirable": row.desirable}
    values: Values = {} if row.margin is None else {"margin": row.margin}
    if isinstance(row, Comparison):
        return values
    distinct = sorted({row.ranks[index] for index in kept})
    return {"ranks": [distinct.index(row.ranks[index]) for index in kept], **values}


def after_one_prompt(prompt: list[int], responses: Sequence[EncodedChat]) -> tuple[list[int], list[list[int]]]:
    """The prompt's ids that all responses follow, and those of each response from there on (`EncodedChat.prompt`)."""
    prompts = [list(response.prompt or prompt) for response in responses]
    shared = min(shared_length(prompts[0], other) for other in prompts)
    tails = [[*before[shared:], *response.ids] for before, response in zip(prompts, responses, strict=True)]
    return prompts[0][:shared], tails


def _distinct(responses: Sequence[list[int]], ranks: Sequence[int]) -> list[int]:
    """Indices of the responses to keep: one of equal ones that tie, none of equal ones that do not."""
    indices_of: dict[tuple[int, ...], list[int]] = {}
    for index, ids in enumerate(responses):
        indices_of.setdefault(tuple(ids), []).append(index)
    return [same[0] for same in indices_of.values() if len({ranks[index] for index in same}) == 1]


def tokenize_steps(rows: Sequence[Steps], tokenizer: Tokenizer, max_length: int) -> tuple[list[Example], Tally]:
    """Prompt and steps joined, each step followed by its row's separator, whose last token carries the step's label.

    The prompt gives way first, from its beginning, as for other responses. A step that does not fit whole is left out
    with its label, as are those after it. No end token: a solution may stop after any step.

    Source: Uesato et al. 2022, arXiv:2211.14275; the layout of tokens is trl's stepwise supervision.
    """
    counts = Tally(rows=len(rows))
    examples = []
    prompts = encode_prompts(tokenizer, rows, counts)
    pieces = [_steps(tokenizer, row, counts) for row in rows]
    encoded = encode_pieces(tokenizer, [piece for of_row in pieces for piece in of_row])
    firsts = [_first_step(tokenizer, row, counts) for row in rows]
    separators = {text: encode(tokenizer, [text], after=ANCHOR)[0] for text in {row.separator for row in rows}}
    for row, prompt, of_row, first in zip(rows, prompts, pieces, firsts, strict=True):
        steps = [encoded[piece] + separators[row.separator] for piece in of_row]
        head = prompt
        if first is not None:
            head, [start] = after_one_prompt(prompt, [first])
            steps[0] = start + separators[row.separator]
        ends = list(accumulate(map(len, steps)))
        kept_head, [response] = truncate(
            head, [[token for step in steps for token in step]], max_length, tokenizer.bos_token_id
        )
        whole = sum(end <= len(response) for end in ends)
        if not whole:
            counts.drop(NO_STEP, row.row_id)
            continue
        if whole < len(steps):
            counts.note_cut(STEPS_CUT, row.row_id)
        note_cuts(counts, row.row_id, len(head) > len(kept_head), False)
        values = {"ends": [len(kept_head) + end - 1 for end in ends[:whole]], "labels": list(row.labels[:whole])}
        ids = kept_head + response[: ends[whole - 1]]
        examples.append(Example.single(ids, [False] * len(ids), row.row_id, **values))
    return counted(examples, counts)


def _steps(tokenizer: Tokenizer, row: Steps, counts: Tally) -> list[Piece]:
    """The steps of a row, the first without what the generation prompt has opened."""
    pieces = [Piece(step, after=ANCHOR) for step in row.steps]
    if isinstance(row.prompt, str):
        return pieces
    form = chat.chat_format(tokenizer)
    first, notes = chat.without_prefill(form, row.steps[0])
    for note in notes:
        counts.note(note, row.row_id)
    return [Piece(first, after=form.after), *pieces[1:]]


def _first_step(tokenizer: Tokenizer, row: Steps, counts: Tally) -> EncodedChat | None:
    """The first step as the template writes it where steps do not go on from what generation opens; else None."""
    if isinstance(row.prompt, str) or chat.goes_on(chat.chat_format(tokenizer), "".join(row.steps)):
        return None
    encoded = chat.encode_each_response(tokenizer, [row.steps[0]], [row.prompt], tools=[row.tools])
    [reply] = _accepted([row], encoded, counts)
    return replace(reply, ids=reply.ids[:-1])  # the end token stands after the last step at best


def tokenize_prompts(
    rows: Sequence[Prompt], tokenizer: Tokenizer, max_length: int, sides: Sides | None = None
) -> tuple[list[Example], Tally]:
    """Prompts of at most `max_length` tokens, longer ones without their beginning (the BOS stays)."""
    counts = Tally(rows=len(rows))
    examples = []
    for row, ids in zip(rows, (sides or DECODER).prompts(tokenizer, rows, counts), strict=True):
        kept = truncate_prompt(ids, max_length, tokenizer.bos_token_id)
        cut = len(ids) > len(kept)
        note_cuts(counts, row.row_id, cut, False)
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
    counts = Tally() if counts is None else counts
    for row in rows if tokenizer.chat_template is not None else ():
        if isinstance(row.prompt, str):
            counts.note(PLAIN_PROMPT, row.row_id)
    encoded = chat.encode_each_prompt(tokenizer, [row.prompt for row in rows], [row.tools for row in rows])
    return _accepted(rows, encoded, counts)


def _responses(
    tokenizer: Tokenizer, replies: Sequence[tuple[PromptedRow, str | Message]], counts: Tally
) -> list[EncodedChat]:
    """Ids of each reply to its row's prompt."""
    rows = [row for row, _ in replies]
    encoded = chat.encode_each_response(
        tokenizer, [reply for _, reply in replies], [row.prompt for row in rows], tools=[row.tools for row in rows]
    )
    return _accepted(rows, encoded, counts)


DECODER = Sides(encode_prompts, _responses)


def _accepted(rows: Sequence[PromptedRow], encoded: Sequence[Encoded | UserError], counts: Tally) -> list[Encoded]:
    """The results, their notes counted; refusals are reported for all rows at once, equal ones once with their rows."""
    done = list[Encoded]()
    refused = dict[str, list[str]]()
    noted = list[tuple[str, str]]()
    for row, result in zip(rows, encoded, strict=True):
        if isinstance(result, UserError):
            refused.setdefault(str(result), []).append(row.row_id)
        else:
            done.append(result)
            noted += [(note, row.row_id) for note in getattr(result, "notes", ())]
    for note, row_id in dict.fromkeys(noted):  # a row of several responses is one row
        counts.note(note, row_id)
    if refused:
        raise refused_rows(refused)
    return done


def refused_rows(refused: Mapping[str, Sequence[str]]) -> UserError:
    """The error that names rows, by why the chat template (or an encoder) refuses them."""
    problems = []
    for why, names in refused.items():
        shown = ", ".join(names[1:SHOWN_IDS]) + (", ..." if len(names) > SHOWN_IDS else "")
        problems.append(f"{names[0]}: {why}" + f" (and {len(names) - 1} more: {shown})" * (len(names) > 1))
    return UserError(list_problems(problems))


def last_span(mask: Sequence[bool]) -> int:
    """Begin of the last unbroken run of True, in a mask that ends with True."""
    return max((index + 1 for index, counts in enumerate(mask) if not counts), default=0)


def note_cuts(counts: Tally, row_id: str, prompt: bool, response: bool) -> None:
    """Count a row whose prompt or response is cut."""
    for what, cut in ((PROMPT_CUT, prompt), (RESPONSE_CUT, response)):
        if cut:
            counts.note_cut(what, row_id)


PROMPT_FLOOR = 0.25  # share of max_length that a long prompt keeps, however long the response is

Value = TypeVar("Value")


def text_budget(max_length: int, special_tokens: int, *, least: int = 2) -> int:
    """Tokens of text that fit into `max_length` beside the special ones."""
    if max_length - special_tokens < least:
        raise UserError(f"data.max_length {max_length} leaves no room beside {special_tokens} special tokens; raise it")
    return max_length - special_tokens


def truncate_longest(texts: Sequence[Sequence[Value]], budget: int) -> list[list[Value]]:
    """Texts cut at their ends to `budget` tokens together: the longest one, of equals the last, loses tokens first.

    Source: Devlin et al. 2019, google-research/bert, create_pretraining_data.py (truncate_seq_pair).
    """
    sizes = [len(text) for text in reversed(texts)]
    while sum(sizes) > budget:
        sizes[sizes.index(max(sizes))] -= 1
    return [list(text[:size]) for text, size in zip(texts, reversed(sizes), strict=True)]


def even_slices(length: int, most: int) -> list[slice]:
    """Successive slices of `length` tokens, as few as possible, each of at most `most` and all of about equal size."""
    count = -(-length // most)
    edges = [length * edge // count for edge in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def truncate(
    prompt: list[int], responses: list[list[int]], max_length: int, bos: int | None
) -> tuple[list[int], list[list[int]]]:
    """Prompt and responses cut so that the prompt with each response has at most `max_length` tokens.

    The prompt gives way first, from its beginning, down to `PROMPT_FLOOR` of the length; then responses lose their
    ends. All responses keep the same prompt, and each keeps at least one token (`max_length` >= 2).
    """
    longest = max(map(len, responses))
    if len(prompt) + longest <= max_length:
        return prompt, responses
    floor = min(len(prompt), max(1, int(max_length * PROMPT_FLOOR)))
    room = min(len(prompt), max(floor, max_length - longest))
    kept = truncate_prompt(prompt, room, bos)
    return kept, [response[: max_length - len(kept)] for response in responses]


def truncate_prompt(prompt: list[int], length: int, bos: int | None) -> list[int]:
    """The last tokens of a prompt, at most `length`, after its BOS where it has one.

    A template may write a BOS before each turn. Where what is left begins with one, it needs no other.
    """
    kept = truncate_left(prompt, length, prompt[:1] == [bos])
    return kept[1:] if len(kept) < len(prompt) and kept[:2] == [bos, bos] else kept


def truncate_left(values: list[Value], length: int, keep_first: bool) -> list[Value]:
    """The last `length` values; with `keep_first` (a BOS) the first and the last `length - 1`."""
    if len(values) <= length:
        return values
    lead = values[:1] if keep_first else []
    return lead + values[len(values) - (length - len(lead)) :]  # counted from the front: [-0:] would be everything
