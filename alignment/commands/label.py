"""The command `alignment label`: the page for annotators, how they agree, and their labels as comparisons and as exports."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from statistics import median
from uuid import NAMESPACE_URL, uuid5

from alignment.errors import UserError, suggest
from alignment.evaluation.agreement import cohen_kappa
from alignment.evaluation.labels import JSON, Label, LabelSession, name_in, read_labels, read_questions, verdict
from alignment.files import hash_of, write_json, write_text
from alignment.serving.label_page import LabelServer

Pair = tuple[str, str, str]  # id of the prompt, two texts in the order of their hashes
PROGRAMS = ("argilla", "label-studio")
KINDS = {  # question -> type of the result in Label Studio, and the key of its value
    "preference": ("choices", "choices"),
    "rank": ("number", "number"),
    "rating": ("rating", "rating"),
    "flags": ("choices", "choices"),
    "comment": ("textarea", "text"),
}


def serve_labels(
    file: str,
    output: Path,
    *,
    annotator: str | None,
    port: int,
    seed: int,
    repeats: float,
    ratings: bool,
    flags: Sequence[str],
) -> None:
    """Serve the page until Ctrl-C, then print the report.

    Args:
        annotator: whom the page is for; None: it asks for the name.
        port: 0 takes a free one.
        seed, repeats, ratings, flags: as in `LabelSession`.
    """
    name = None if annotator is None else name_in({"annotator": annotator})
    items = read_questions(file)
    session = LabelSession(
        items, output, seed=seed, repeats=repeats, ratings=ratings, flags=flags, report=agreement_lines
    )
    with LabelServer(port, {"/show": session.show, "/answer": session.answer}, name) as server:
        print(f"{server.url}\nopen this address; labels go to {output}; Ctrl-C ends", file=sys.stderr, flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    print("\n".join(agreement_lines(session.labels.values())))


def write_labels(file: str, output: Path, comparisons: str | None, export: tuple[str, str] | None) -> None:
    """Write the files that are asked for, of the labels of a file's questions, and print the report."""
    if export is not None and export[0] not in PROGRAMS:
        raise UserError(f"--export {export[0]}: no such program; {suggest(export[0], PROGRAMS)}")
    labels = read_labels(output, read_questions(file)).values()
    if comparisons is not None:
        print(write_comparisons(Path(comparisons), labels))
    if export is not None:
        print(write_export(Path(export[1]), export[0], labels))
    print("\n".join(agreement_lines(labels)))


# Agreement


def agreement_lines(labels: Iterable[Label]) -> list[str]:
    """Lines: pace and self-agreement of each annotator, agreement of every two; a tie is a verdict of its own."""
    by_judge: dict[str, list[Label]] = {}
    for label in labels:
        by_judge.setdefault(label.judge, []).append(label)
    firsts = {judge: pair_verdicts(label for label in own if not label.repeat) for judge, own in by_judge.items()}
    lines = [
        f"{judge}: {len(own)} answers, {median(label.seconds for label in own):.1f} s each (median)"
        + agreement_on("repeats", pair_verdicts(label for label in own if label.repeat), firsts[judge])
        for judge, own in by_judge.items()
    ]
    lines += [
        f"{one} and {other}" + agreement_on("pairs", firsts[one], firsts[other])
        for one, other in combinations(firsts, 2)
    ]
    return lines or ["no labels yet"]


def pair_verdicts(labels: Iterable[Label]) -> dict[Pair, float]:
    """1, 0.5 or 0 for the first text of every pair of responses that was compared or ranked.

    The texts of a pair stand in the order of their hashes, which is as good as drawn: chance agreement, which kappa takes
    away, is then that of judges who prefer neither side.
    """
    return {
        (label.id, one, other): verdict(place, lower)
        for label in labels
        for (one, place), (other, lower) in combinations(
            sorted(zip(label.responses, label.ranks, strict=True), key=lambda each: hash_of(each[0])), 2
        )
    }


def agreement_on(things: str, ours: Mapping[Pair, float], theirs: Mapping[Pair, float]) -> str:
    """On how many common pairs two sets of verdicts agree, and Cohen's kappa."""
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return f"; no {things} to compare"
    sides = [[side[pair] for pair in common] for side in (ours, theirs)]
    equal, kappa = sum(a == b for a, b in zip(*sides, strict=True)), cohen_kappa(*sides)["value"]
    chance = "" if kappa is None else f", kappa {kappa:.2f}"
    return f"; {equal} of {len(common)} {things} judged alike ({equal / len(common):.0%}{chance})"


# Files for training and for other programs


def write_comparisons(path: Path, labels: Iterable[Label]) -> str:
    """Write the rows that reward models and DPO are trained on; how many there are, and what is left out.

    Of a pair `prompt`, `chosen`, `rejected`; of more responses, and of pairs beside them, `prompt`, `responses`, `ranking`.
    """
    judged = [label for label in labels if len(label.responses) > 1]
    kept = [label for label in judged if any(label.ranks) and not label.repeat]
    form = ranking_row if any(len(label.responses) > 2 for label in kept) else pair_row
    rows = [{"prompt": label.prompt, **form(label), "annotator": label.judge} for label in kept]
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    repeats = sum(label.repeat for label in judged)
    return f"{path}: {len(rows)} rows; left out: {len(judged) - repeats - len(kept)} ties, {repeats} repeats"


def pair_row(label: Label) -> JSON:
    """The better response of a pair, and the other one."""
    best = label.ranks.index(0)
    return {"chosen": label.responses[best], "rejected": label.responses[1 - best]}


def ranking_row(label: Label) -> JSON:
    """The responses, and their numbers best first, ties as a list in the list."""
    places = [[i for i, rank in enumerate(label.ranks) if rank == place] for place in sorted(set(label.ranks))]
    return {"responses": label.responses, "ranking": [same if same[1:] else same[0] for same in places]}


def write_export(path: Path, program: str, labels: Iterable[Label]) -> str:
    """Write records of Argilla or tasks of Label Studio, each with the answers of all annotators; repeats are left out.

    Fields are `prompt` and `response_N`, questions those of `answers_of`; N counts from 1, the same for all annotators.

    Source: docs.argilla.io, records.from_json; labelstud.io, guide/task_format.
    """
    groups: dict[str, list[Label]] = {}
    for label in labels:
        if not label.repeat:
            own = label.in_order(sorted(range(len(label.responses)), key=label.responses.__getitem__))
            groups.setdefault(label.key, []).append(own)
    write_json(
        path, [(argilla_record if program == "argilla" else label_studio_task)(group) for group in groups.values()]
    )
    users = {label.judge: user_id(label) for group in groups.values() for label in group}
    return f"{path}: {len(groups)} rows; " + ", ".join(f"{name} is the user {user}" for name, user in users.items())


def user_id(label: Label) -> str:
    """The annotator's id: Argilla's users have UUIDs."""
    return str(uuid5(NAMESPACE_URL, label.judge))


def fields_of(label: Label) -> dict[str, str]:
    """The texts that annotators see."""
    turns = label.prompt
    prompt = turns if isinstance(turns, str) else "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)
    return {"prompt": prompt} | {f"response_{n}": response for n, response in enumerate(label.responses, 1)}


def answers_of(label: Label) -> dict[str, object]:
    """The answers by question: `preference` (response_1, response_2 or tie), or `rank_N`; `rating_N`, `flags_N`, `comment`."""
    found: dict[str, object] = {"comment": label.comment} if label.comment else {}
    if len(label.ranks) == 2:
        found["preference"] = f"response_{label.ranks.index(0) + 1}" if any(label.ranks) else "tie"
    elif len(label.ranks) > 2:
        found |= {f"rank_{n}": rank + 1 for n, rank in enumerate(label.ranks, 1)}
    found |= {f"rating_{n}": rating for n, rating in enumerate(label.ratings, 1)}
    return found | {f"flags_{n}": flags for n, flags in enumerate(label.flags, 1) if flags}


def argilla_record(group: Sequence[Label]) -> JSON:
    """The labels of one question as a record of Argilla."""
    given: dict[str, list[JSON]] = {}
    for label in group:
        for name, value in answers_of(label).items():
            given.setdefault(name, []).append({"value": value, "user_id": user_id(label), "status": "submitted"})
    return {"id": group[0].key, "fields": fields_of(group[0]), "metadata": {}, "suggestions": {}, "responses": given}


def label_studio_task(group: Sequence[Label]) -> JSON:
    """The labels of one question as a task of Label Studio."""
    annotations = [
        {"lead_time": label.seconds, "result": list(map(label_studio_result, answers_of(label).items()))}
        for label in group
    ]
    data = {"id": group[0].id, **fields_of(group[0]), "annotators": [label.judge for label in group]}
    return {"data": data, "annotations": annotations}


def label_studio_result(answer: tuple[str, object]) -> JSON:
    """A question's name and the answer to it as a result of an annotation in Label Studio."""
    name, value = answer
    question, _, number = name.partition("_")
    kind, key = KINDS[question]
    place = {"from_name": name, "to_name": f"response_{number}" if number else "prompt", "type": kind}
    return {"id": name, **place, "value": {key: [value] if isinstance(value, str) else value}}
