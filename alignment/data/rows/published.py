"""Rows of labeled data sets as they are published, under our column names: GLUE's pairs, and four sets of multiple choice.

A row is recognized by its columns; a row of other columns is left as it is.
"""

import json
from collections.abc import Callable

from alignment.data.rows.fields import BadRow, list_field, number_field, text_field
from alignment.data.rows.records import Columns

PAIRS = (  # columns of the two texts: MRPC, RTE, STS-B, WNLI; SNLI and MNLI; QQP; QNLI
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
)
COPA_QUESTIONS = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}


def pair_rows(row: Columns) -> list[Columns]:
    """The row with `text` and `pair`, where it has the two texts under other names."""
    names = next((names for names in PAIRS if row.keys() >= set(names) and "text" not in row), None)
    return [row] if names is None else [{**row, "text": row[names[0]], "pair": row[names[1]]}]


def choice_rows(row: Columns) -> list[Columns]:
    """The rows `context`, `choices` and `label` of a row of RACE, COPA, StoryCloze or SWAG."""
    text = row.get("text")
    if len(row) == 1 and isinstance(text, str) and text.startswith("{"):  # a file of RACE is one object, named .txt
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadRow("text", "is not JSON", str(error)) from error
    read = next((read for column, read in CHOICE_SETS.items() if column in row), None)
    return [row] if read is None else read(row)


def _race(row: Columns) -> list[Columns]:
    """An article with its questions (the authors' files), or with one question (the Hub's rows).

    Source: Lai et al. 2017, arXiv:1704.04683; a blank "_" in the question is filled with the option.
    """
    article = text_field(row, "article")
    if "questions" not in row:
        row = {
            **row,
            "questions": [row.get("question")],
            "options": [row.get("options")],
            "answers": [row.get("answer")],
        }
    questions, options, answers = (list_field(row, key) for key in ("questions", "options", "answers"))
    if not len(questions) == len(options) == len(answers):
        raise BadRow("questions", "must be as many as options and answers")
    return [_race_question(article, *each) for each in zip(questions, options, answers, strict=True)]


def _race_question(article: str, question: object, options: object, answer: object) -> Columns:
    asked = text_field({"questions": question}, "questions")
    texts = [text_field({"options": option}, "options") for option in list_field({"options": options}, "options")]
    if not isinstance(answer, str) or len(answer) != 1 or not 0 <= (label := ord(answer) - ord("A")) < len(texts):
        raise BadRow("answers", "must be the letter of an option, from A", f"{answer!r} of {len(texts)}")
    # The question goes with the option: of a pair that is too long the article is cut.
    choices = [asked.replace("_", text) if "_" in asked else f"{asked} {text}" for text in texts]
    return {"context": article, "choices": choices, "label": label}


def _copa(row: Columns) -> list[Columns]:
    """A premise and the likelier of two causes or effects, as SuperGLUE has it. Source: Roemmele et al. 2011."""
    if (kind := text_field(row, "question")) not in COPA_QUESTIONS:
        raise BadRow("question", "must be cause or effect", kind[:40])
    context = f"{text_field(row, 'premise')} {COPA_QUESTIONS[kind]}"
    return [{**row, "context": context, "choices": [row["choice1"], row.get("choice2")]}]


def _story_cloze(row: Columns) -> list[Columns]:
    """Four sentences and the right one of two endings. Source: Mostafazadeh et al. 2016, arXiv:1604.01696."""
    if (answer := number_field(row, "AnswerRightEnding")) not in (1, 2):
        raise BadRow("AnswerRightEnding", "must be 1 or 2", repr(answer))
    context = " ".join(text_field(row, f"InputSentence{number}") for number in range(1, 5))
    choices = [row.get(f"RandomFifthSentenceQuiz{number}") for number in (1, 2)]
    return [{"context": context, "choices": choices, "label": answer - 1}]


def _swag(row: Columns) -> list[Columns]:
    """A sentence, and the beginning of the next with four endings.

    Source: Zellers et al. 2018, arXiv:1808.05326; the split is that of Devlin et al. 2019, arXiv:1810.04805, section 4.4.
    """
    choices = [f"{text_field(row, 'sent2')} {text_field(row, f'ending{number}')}" for number in range(4)]
    return [{**row, "context": text_field(row, "sent1"), "choices": choices}]


CHOICE_SETS: dict[str, Callable[[Columns], list[Columns]]] = {  # by a column that no other set has
    "article": _race,
    "choice1": _copa,
    "InputSentence1": _story_cloze,
    "sent1": _swag,
}
