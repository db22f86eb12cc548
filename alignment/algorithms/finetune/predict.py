"""A model fine-tuned for a downstream task, put to use: texts in, classes and answers out. Trains nothing."""

from collections.abc import Sequence
from typing import Any

import torch

from alignment.algorithms.finetune.model import HEADS, collate_for, encode_with
from alignment.algorithms.finetune.scoring import answers_to, read_all
from alignment.data.tasks.classification import first_tokens
from alignment.data.tasks.rows import Choice, LabeledText, LabeledWords, Question
from alignment.data.text.special_tokens import tokenize_with_offsets
from alignment.errors import UserError, raise_all
from alignment.loading import find_directory, load_tokenizer
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.models.safetensors_files import read_config


def predict(source: str, rows: Sequence[Any], *, micro_batch_tokens: int = 16_384) -> list[Any]:
    """What a model of `alignment finetune` says of each row, in order.

    Rows by task: sequence, a text -> its label; pair, (text, text) -> its label; tokens, a list of words -> a list of
    labels, None for words beyond `max_length` or without a token; span, (question, context) -> the answer, "" for none;
    choice, (context, choices) -> the number of the best.

    Args:
        source: `output/model` of a run.

    Raises:
        UserError: a model from elsewhere, or rows of which the tokenizer makes no token.
    """
    if not rows:
        return []
    directory = find_directory(source)
    config, tokenizer = read_config(directory), load_tokenizer(source)
    own = (config.get("task_specific_params") or {}).get("finetune")
    if own is None:
        raise UserError(f"{source}: config.json does not say how rows are read; `alignment finetune` writes it there")
    task, form = own["task"], own["format"]
    names = {int(number): name for number, name in (config.get("id2label") or {}).items()}
    read_as = [_row(task, row, number, names) for number, row in enumerate(rows)]
    options = {name: own[name] for name in ("stride", "max_question")} if task == "question_answering" else {}
    examples = encode_with(task, form, read_as, tokenizer, own["max_length"], names, **options)
    known = {example.row_id for example in examples}
    raise_all(
        f"row {row.row_id}: text of which the tokenizer makes no token" for row in read_as if row.row_id not in known
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_pretrained(directory, HEADS[task], device=device)
    scores, _ = read_all(model, examples, collate_for(task, form), task, micro_batch_tokens)
    if task == "question_answering":
        return answers_to(examples, scores, [context for _, context in rows], own["max_answer"], own["no_answer"])
    if task == "multiple_choice":
        return [int(each.argmax()) for each in scores]
    if task == "token_classification":
        return [
            _word_labels(words, example, each, tokenizer, names)
            for words, example, each in zip(rows, examples, scores, strict=True)
        ]
    return [names[int(each.argmax())] for each in scores]


def _row(task: str, row: Any, number: int, names: dict[int, str]) -> Any:
    """The row as training reads it, its label any."""
    name, place = names.get(0, ""), str(number)
    match task:
        case "classification":
            return LabeledText(row, None, name, place)
        case "pair_classification":
            return LabeledText(row[0], row[1], name, place)
        case "token_classification":
            return LabeledWords(list(row), [name] * len(row), place)
        case "question_answering":
            return Question(row[0], row[1], [], place)
        case _:
            return Choice(row[0], list(row[1]), 0, place)


def _word_labels(words: Sequence[str], example: Any, scores: Any, tokenizer: Any, names: dict[int, str]) -> list[Any]:
    lead, own = example.encoded.starts[0], example.encoded.ordinary
    found: list[str | None] = []
    for place in first_tokens(words, tokenize_with_offsets(tokenizer, [" ".join(words)])[0]):
        read = place is not None and place + lead < len(own) and own[place + lead]
        found.append(names[int(scores[place + lead].argmax())] if read else None)  # type: ignore[operator]
    return found
