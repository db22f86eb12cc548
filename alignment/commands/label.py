"""The command `alignment label`: the page for annotators, and their labels as comparisons and for other programs."""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from alignment.files import write_json, write_json_lines
from alignment.judging.label_page import LabelServer
from alignment.judging.labels import JSON, Label, LabelSession, name_in
from alignment.training.run.directory import lock

PREFERENCES: dict[tuple[int, ...], str] = {  # by the ranks of a pair
    (0, 1): "response_1",
    (0, 0): "tie",
    (1, 0): "response_2",
}
KINDS = {  # question -> type of the result in Label Studio, and the key of its value
    "preference": ("choices", "choices"),
    "rank": ("number", "number"),
    "rating": ("rating", "rating"),
    "flags": ("choices", "choices"),
    "comment": ("textarea", "text"),
}


def serve_labels(session: LabelSession, annotator: str | None, port: int) -> None:
    """Serve the page until Ctrl-C.

    Args:
        annotator: whom the page is for; None: it asks for the name.
        port: 0 takes a free one.

    Raises:
        UserError: another page writes into the file.
    """
    name = None if annotator is None else name_in({"annotator": annotator})
    file = session.path
    routes = {"/show": session.show, "/answer": session.answer}
    with LabelServer(port, routes, name) as server, lock(file.parent, file.name):
        print(
            f"http://127.0.0.1:{server.server_port}/?token={server.token}\n"
            f"open this address; labels go to {file}; Ctrl-C ends",
            file=sys.stderr,
            flush=True,
        )
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def write_labels(
    labels: Sequence[Label], comparisons: str | None, argilla: str | None, label_studio: str | None
) -> None:
    """Write the files that are asked for."""
    if comparisons is not None:
        print(write_comparisons(Path(comparisons), labels))
    for path, form in ((argilla, argilla_record), (label_studio, label_studio_task)):
        if path is not None:
            print(write_export(Path(path), labels, form))


def write_comparisons(path: Path, labels: Iterable[Label]) -> str:
    """Write the rows that reward models and DPO are trained on; how many there are, and what is left out.

    Of a pair `prompt`, `chosen`, `rejected`; of more responses, and of pairs beside them, `prompt`, `responses`,
    `ranks`.
    """
    judged = [label for label in labels if len(label.responses) > 1]
    kept = [
        label.in_order(sorted(range(len(label.ranks)), key=label.ranks.__getitem__))
        for label in judged
        if any(label.ranks) and not label.repeat
    ]
    ranked = any(len(label.responses) > 2 for label in kept)
    rows = [
        {
            "prompt": label.prompt,
            **(
                {"responses": label.responses, "ranks": label.ranks}
                if ranked
                else {"chosen": label.responses[0], "rejected": label.responses[1]}
            ),
            "annotator": label.judge,
        }
        for label in kept
    ]
    write_json_lines(path, rows)
    return f"{path}: {len(rows)} rows; {len(judged) - len(rows)} ties and repeats are left out"


# Other programs


def write_export(path: Path, labels: Iterable[Label], form: Callable[[Sequence[Label]], JSON]) -> str:
    """Write a record or task for each question with the answers of all annotators; how many there are.

    Fields are `prompt` and `response_N`, questions those of `answers_of`; N counts from 1, the same for all annotators.
    """
    answers = [label.in_order(label.by_text) for label in labels if not label.repeat]
    groups = groupby(sorted(answers, key=lambda label: label.key), key=lambda label: label.key)
    rows = [form(list(group)) for _, group in groups]
    write_json(path, rows)
    return f"{path}: {len(rows)} rows"


def fields_of(label: Label) -> JSON:
    """The texts that annotators see; the prompt may be messages."""
    return {"prompt": label.prompt, **{f"response_{n}": text for n, text in enumerate(label.responses, 1)}}


def answers_of(label: Label) -> JSON:
    """Answers by question: `preference` (response_1, response_2, tie) or `rank_N`; `rating_N`, `flags_N`, `comment`."""
    places = [place + 1 for place in label.ranks] if len(label.ranks) > 2 else []
    answers: JSON = {"comment": label.comment, "preference": PREFERENCES.get(label.ranks)}
    for name, values in {"rank": places, "rating": label.ratings, "flags": label.flags}.items():
        answers |= {f"{name}_{n}": value for n, value in enumerate(values, 1)}
    return {name: value for name, value in answers.items() if value}


def argilla_record(group: Sequence[Label]) -> JSON:
    """The labels of one question as a record of Argilla, whose users have UUIDs: those of the annotators' names.

    Source: docs.argilla.io, records.from_json.
    """
    responses: dict[str, list[JSON]] = {}
    for label in group:
        user = {"user_id": str(uuid5(NAMESPACE_URL, label.judge)), "status": "submitted"}
        for name, value in answers_of(label).items():
            responses.setdefault(name, []).append({"value": value, **user})
    return {
        "id": group[0].key,
        "fields": fields_of(group[0]),
        "metadata": {},
        "suggestions": {},
        "responses": responses,
    }


def label_studio_task(group: Sequence[Label]) -> JSON:
    """The labels of one question as a task of Label Studio.

    Source: labelstud.io, guide/task_format.
    """
    annotations = []
    for label in group:
        answers = [label_studio_result(*answer) for answer in answers_of(label).items()]
        annotations.append({"lead_time": label.seconds, "result": answers})
    names = {"annotators": [label.judge for label in group]}
    return {"data": {"id": group[0].id, **fields_of(group[0]), **names}, "annotations": annotations}


def label_studio_result(name: str, value: object) -> JSON:
    """An answer as a result of an annotation in Label Studio."""
    question, _, suffix = name.partition("_")
    kind, key = KINDS[question]
    target = f"response_{suffix}" if suffix else "prompt"
    answer = {key: [value] if isinstance(value, str) else value}
    return {"id": name, "from_name": name, "to_name": target, "type": kind, "value": answer}
