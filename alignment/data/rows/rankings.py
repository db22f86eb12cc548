"""Rows of K responses to one prompt, by rank or by score, the pairs they make, and rows of responses in labeled steps.

Understood: `responses` with `ranking` (best first), `ranks` or `scores`; `generations` with `ratings`; UltraFeedback's
`completions` and Nectar's `answers`, which are lists of objects; trees of OpenAssistant; a pair, as K = 2. Of steps:
trl's stepwise supervision (`prompt`, `completions`, `labels`), PRM800K's records, Math-Shepherd's tagged text,
RLHFlow's dialogues, ProcessBench.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from alignment.data.rows.fields import (
    BadRow,
    flag_field,
    list_field,
    messages_field,
    number_field,
    object_field,
    objects_field,
    prompt_field,
    reply_field,
    required_number,
    text_field,
    type_name,
)
from alignment.data.rows.formats import explicit_prompt, parse_text_pair
from alignment.data.rows.records import EQUAL_RESPONSES, TIED, Columns, Messages, Ranking, Record, SkippedRow, Steps

RESPONSE_KEYS = ("response", "answer", "text", "content")  # of an object in a list of responses
SCORE_KEYS = ("overall_score", "score", "rating", "fine-grained_score")  # higher is better
NO_RANKED_REPLIES = "no two ranked replies in the tree"
TREE_ROLES = {"prompter": "user", "assistant": "assistant"}
TAG = "\u043a\u0438"  # the token that ends a step in Math-Shepherd's `input`
FIRST_STEP = "Step 1:"
NO_STEPS = "no labeled step"


def parse_ranking(row: Columns, row_id: str, responses: str, judgment: str) -> Ranking:
    """Responses and a list that judges them.

    `ranking` has them best first, each as its number from 0 or as its text, ties as a list in the list; `ranks` has the
    place of each, the lowest best; `scores` and `ratings` a number for each, the highest best.
    """
    texts = [reply_field({responses: item}, responses) for item in list_field(row, responses)]
    judged = list_field(row, judgment)
    if judgment == "ranking":
        return _ranking(row, texts, row_id, ranks=_listed_ranks(judged, texts))
    numbers = [required_number(item, judgment) for item in judged]
    if len(numbers) != len(texts):
        raise BadRow(judgment, f"must be as many as {responses}", f"{len(numbers)} and {len(texts)}")
    if judgment == "ranks":
        return _ranking(row, texts, row_id, ranks=numbers)
    return _ranking(row, texts, row_id, scores=numbers)


def parse_rated(row: Columns, row_id: str, key: str) -> Ranking:
    """A list of objects, each a response with its score or rank (UltraFeedback, Nectar)."""
    texts = []
    scores = []
    ranks = []
    for item in list_field(row, key):
        if not isinstance(item, dict):
            raise BadRow(key, f"must hold objects with a response and a score, holds {type_name(item)}")
        texts.append(text_field({key: _first(item, RESPONSE_KEYS, key, "response")}, key))
        if item.get("rank") is not None:
            ranks.append(required_number(item["rank"], key))
        else:
            scores.append(required_number(_first(item, SCORE_KEYS, key, "score"), key))
    if scores and ranks:
        raise BadRow(key, "some responses have a rank and some have a score")
    return _ranking(row, texts, row_id, ranks=ranks, scores=scores)


def _first(item: Columns, names: Sequence[str], key: str, what: str) -> object:
    value = next((item[name] for name in names if item.get(name) is not None), None)
    if value is None:
        raise BadRow(key, f"a response without its {what}", f"it has {', '.join(map(str, item))}")
    return value


def _ranking(
    row: Columns,
    responses: Sequence[str],
    row_id: str,
    *,
    ranks: Sequence[float] = (),
    scores: Sequence[float] = (),
    prompt: str | Messages | None = None,
) -> Ranking:
    """A ranking of at least two responses that differ; an `instruction` without an `input` is the prompt as it stands.

    `ranks` are places, the lowest the best; without them `scores` rank, the highest the best.
    """
    if prompt is None:
        more = row.get("history") or str(row.get("input") or "").strip()
        whole = more or any(row.get(key) is not None for key in ("prompt", "conversations"))
        prompt = explicit_prompt(row) if whole else text_field(row, "instruction" if "instruction" in row else "prompt")
    if len(responses) < 2:
        raise BadRow("responses", "must be at least two to rank", f"{len(responses)} given")
    if len(set(responses)) < len(responses):
        raise SkippedRow(EQUAL_RESPONSES)
    margin = number_field(row, "margin")
    if margin is not None and len(responses) > 2:
        raise BadRow("margin", "tells by how much the better of two responses leads; for more of them give scores")
    numbers = ranks or [-score for score in scores]
    order = sorted(set(numbers))
    places = tuple(order.index(rank) for rank in numbers)
    return Ranking(prompt, tuple(responses), places, row_id, tuple(scores) or None, margin)


def _listed_ranks(ranking: Sequence[object], responses: Sequence[str]) -> list[int]:
    """The place of each response, 0 the best, from the list of them best first, which names each of them once."""
    rank_of: dict[int, int] = {}
    for rank, entry in enumerate(ranking):
        for name in entry if isinstance(entry, list) else [entry]:
            index = responses.index(name) if isinstance(name, str) and name in responses else name
            if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(responses):
                seen = f"{name!r:.40}; they are numbered 0 to {len(responses) - 1}, the best first"
                raise BadRow("ranking", "names a response that is not there", seen)
            if index in rank_of:
                raise BadRow("ranking", "names a response twice", repr(name)[:40])
            rank_of[index] = rank
    missing = [index for index in range(len(responses)) if index not in rank_of]
    if missing:
        raise BadRow("ranking", "leaves out a response", f"number {missing[0]} of {len(responses)}, from 0")
    return [rank_of[index] for index in range(len(responses))]


def parse_pair_ranking(row: Columns, row_id: str, *_: str) -> Ranking:
    """A pair as a ranking of two, the chosen one first unless they are tied; its margin and scores are kept."""
    tied = bool(row.get(TIED))
    pair = parse_text_pair({**row, TIED: False}, row_id)
    rated = number_field(row, "score_chosen"), number_field(row, "score_rejected")
    scores = None if None in rated else cast("tuple[float, float]", rated)
    return Ranking(pair.prompt, (pair.chosen, pair.rejected), (0, int(not tied)), row_id, scores, pair.margin)


def parse_tree(row: Columns, row_id: str, *_: str) -> list[Record]:
    """The prompts of a tree of messages (OpenAssistant) with two ranked replies or more, and the dialogue before."""
    return _some(_ranked_replies(object_field(row, "prompt"), [], row_id), NO_RANKED_REPLIES)


def _ranked_replies(node: Columns, before: Messages, row_id: str, way: tuple[int, ...] = ()) -> Iterator[Ranking]:
    """Rankings of a message's replies and of what follows them; ids end in the numbers of the replies on the way."""
    role = node.get("role")
    if not isinstance(role, str) or role not in TREE_ROLES:
        raise BadRow("prompt", "unknown role in the tree", f"{role!r}; known: {', '.join(TREE_ROLES)}")
    dialogue = [*before, {"role": TREE_ROLES[role], "content": text_field(node, "text")}]
    replies = [reply for reply in objects_field(node, "replies") if not reply.get("deleted")]
    ranked = [reply for reply in replies if reply.get("rank") is not None]
    if TREE_ROLES[role] == "user" and len(ranked) > 1:
        ranks = [required_number(reply["rank"], "prompt") for reply in ranked]
        name = f"{row_id}[{'.'.join(map(str, way))}]" if way else row_id
        yield _ranking({}, [text_field(reply, "text") for reply in ranked], name, ranks=ranks, prompt=dialogue)
    for index, reply in enumerate(replies):
        yield from _ranked_replies(reply, dialogue, row_id, (*way, index))


# Steps


def parse_steps(row: Columns, row_id: str, *_: str) -> Steps:
    """trl's stepwise supervision: a prompt, the texts of the steps, and a label for each."""
    steps = [text_field({"completions": step}, "completions") for step in list_field(row, "completions")]
    labels = [flag_field({"labels": label}, "labels") for label in list_field(row, "labels")]
    if len(steps) != len(labels):
        raise BadRow("labels", "must be as many as completions", f"{len(labels)} labels, {len(steps)} steps")
    return Steps(prompt_field(row, "prompt"), tuple(steps), tuple(labels), row_id)


def parse_prm800k(row: Columns, row_id: str, *_: str) -> list[Record]:
    """PRM800K's records: the solution that the annotators followed, and one row for each other continuation they rated.

    A rating of -1 is wrong; 1 and the neutral 0 are right.

    Source: Lightman et al. 2023, arXiv:2305.20050; they score neutral steps as right.
    """
    solutions = _solutions(list_field(object_field(row, "label"), "steps"))
    problem = text_field(object_field(row, "question"), "problem")
    rows = (
        Steps(problem, tuple(texts), tuple(labels), f"{row_id}[{index}]")
        for index, (texts, labels) in enumerate(solutions)
    )
    return _some(rows, NO_STEPS)


def _some(records: Iterable[Record], none: str) -> list[Record]:
    """The records of a row, which is left out where it has none."""
    if row_records := list(records):
        return row_records
    raise SkippedRow(none)


def _solutions(steps: Sequence[object]) -> Iterator[tuple[list[str], list[bool]]]:
    """Steps with labels: first every continuation that was not followed, then the solution that was."""
    texts = list[str]()
    labels = list[bool]()
    for step in steps:
        if not isinstance(step, dict):
            raise BadRow("label", f"a step must be an object, is {type_name(step)}")
        completions = enumerate(objects_field(step, "completions"))
        rated: dict[float, Columns] = {
            index: candidate for index, candidate in completions if candidate.get("rating") is not None
        }
        chosen = number_field(step, "chosen_completion")
        for index, completion in rated.items():
            if index != chosen:
                yield [*texts, text_field(completion, "text")], [*labels, _is_right(completion)]
        if chosen in rated:
            texts.append(text_field(rated[chosen], "text"))
            labels.append(_is_right(rated[chosen]))
        elif human := step.get("human_completion"):
            texts.append(text_field(human if isinstance(human, dict) else {"text": human}, "text"))
            labels.append(True)
        elif rated:
            return  # the solution ends here; the rows of its last continuations hold the steps before
        else:
            break
    if texts:
        yield texts, labels


def _is_right(completion: Columns) -> bool:
    rating = number_field(completion, "rating")
    if rating not in (-1, 0, 1):
        raise BadRow("label", "the rating of a step must be -1, 0 or 1", repr(completion.get("rating"))[:40])
    return rating >= 0


def parse_tagged_steps(row: Columns, row_id: str, *_: str) -> Steps:
    """Math-Shepherd's texts: in `input` each step ends with a tag, and `label` is that text with + or - for the tag.

    Source: Wang et al. 2024, arXiv:2312.08935.
    """
    pieces = text_field(row, "input").split(TAG)
    marked = text_field(row, "label")
    labels = list[bool]()
    for step, piece in enumerate(pieces[:-1], start=1):
        rest = marked.removeprefix(piece)
        if not marked.startswith(piece) or rest[:1] not in ("+", "-"):
            raise BadRow("label", "is not the input's text with + or - at the end of each step", f"step {step}")
        labels.append(rest[0] == "+")
        marked = rest[1:]
    if not labels:
        raise BadRow("input", f"has no step that ends with {TAG!r}")
    prompt, first = _question_and_step(pieces[0], "input")
    return Steps(prompt, (first, *(piece.strip() for piece in pieces[1:-1])), tuple(labels), row_id)


def _question_and_step(text: str, key: str) -> tuple[str, str]:
    """A text cut before its first step."""
    prompt, first, rest = text.strip().partition(FIRST_STEP)
    if not first or not prompt.strip():
        raise BadRow(key, f"has no question before {FIRST_STEP!r}")
    return prompt, first + rest


def parse_marked_turns(row: Columns, row_id: str, key: str) -> Steps:
    """A dialogue of steps, each answered by + or -; the first one follows the question (RLHFlow)."""
    messages = messages_field(row, key)
    marks = [message["content"].strip() for message in messages[1::2]]
    if len(messages) % 2 or not set(marks) <= {"+", "-"}:
        raise BadRow(key, "each step must be answered by + or -")
    texts = [message["content"] for message in messages[::2]]
    prompt, first = _question_and_step(texts[0], key)
    return Steps(prompt, (first, *texts[1:]), tuple(mark == "+" for mark in marks), row_id)


def parse_first_error(row: Columns, row_id: str, problem: str, steps: str, label: str) -> Steps:
    """Steps and the number of the first wrong one, -1 if all are right; later ones are unknown (ProcessBench)."""
    texts = [text_field({steps: step}, steps) for step in list_field(row, steps)]
    wrong = required_number(row[label], label)
    if wrong not in range(-1, len(texts)):
        raise BadRow(label, "must be the number of a step from 0, or -1", f"{wrong:g} of {len(texts)}")
    labels = [index != wrong for index in range(len(texts) if wrong < 0 else int(wrong) + 1)]
    return Steps(text_field(row, problem), tuple(texts[: len(labels)]), tuple(labels), row_id)
