"""Rows of data sets as they are published, under our column names: preferences, GLUE's pairs, sets of multiple choice.

A row is recognized by its columns; a row of other columns is left as it is.
"""

from collections.abc import Callable, Mapping

from alignment.data.rows.fields import (
    BadRow,
    decoded,
    list_field,
    number_field,
    object_field,
    objects_field,
    text_field,
)
from alignment.data.rows.records import TIED, Columns, SkippedRow

PAIRS = (  # columns of the two texts: MRPC, RTE, STS-B, WNLI; SNLI and MNLI; QQP; QNLI
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
)
COPA_QUESTIONS = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}

# Verdict -> how far the second response leads: below 0 the first is better, at 0 neither is
BETTER = {0: -1, 1: 1}
FIRST_IS_BETTER = {1: -1, 0: 1}
STRENGTH = {strength: strength for strength in range(-3, 4)}
WINNER = {"model_a": -1, "model_b": 1, "tie": 0, "tie (bothbad)": 0, "bothbad": 0, "both_bad": 0}
PREFERENCES: tuple[tuple[str, str, str, str, Mapping | str], ...] = (
    # prompt, first response, second response, verdict, and its values, or the column that it is compared with
    ("prompt", "response_0", "response_1", "better_response_id", BETTER),  # PKU-SafeRLHF
    ("history", "human_ref_A", "human_ref_B", "labels", FIRST_IS_BETTER),  # SHP
    ("prompt", "response_1", "response_2", "preference_strength", STRENGTH),  # HelpSteer2
    ("context", "response1", "response2", "overall_preference", STRENGTH),  # HelpSteer3
    ("question", "answer_0", "answer_1", "score_0", "score_1"),  # WebGPT
    ("info", "summary_0", "summary_1", "choice", BETTER),  # summarize_from_feedback
    ("", "conversation_a", "conversation_b", "winner", WINNER),  # Chatbot Arena
    ("", "conversation_a", "conversation_b", "winner_model_a", "winner_model_b"),  # its texts of 55,000 battles
)
PARTED = "the two dialogues part before their last replies, so these answer different prompts"


# Preferences, calls and turns


def published_row(row: Columns) -> Columns:
    """The row under our column names, where it is one of a published set of preferences, tool calls or prompts."""
    for column, read in OTHER_SETS.items():
        if column in row:
            row = read(row)
    if row.keys().isdisjoint(VERDICTS) or row.keys() >= {"chosen", "rejected"}:
        return row
    for prompt, first, second, verdict, values in PREFERENCES:
        compared = values if isinstance(values, str) else verdict
        if row.keys() >= {*filter(None, [prompt]), first, second, verdict, compared}:
            lead = _lead(row, verdict, values)
            better, worse = (second, first) if lead > 0 else (first, second)
            used = {prompt, first, second, verdict, compared}
            named = {name: value for name, value in row.items() if name not in used}
            named |= {"chosen": row[better], "rejected": row[worse]}
            if prompt:
                named["prompt"] = _preference_prompt(row, prompt)
            elif _before_reply(row[first]) != _before_reply(row[second]):
                raise SkippedRow(PARTED)
            if values is STRENGTH:
                named["margin"] = abs(lead)
            return named if lead else {**named, TIED: True}
    return row


def _lead(row: Columns, verdict: str, values: Mapping | str) -> float:
    """By how much the second response is better than the first."""
    if isinstance(values, str):
        return _required_number(row, values) - _required_number(row, verdict)
    seen = text_field(row, verdict) if values is WINNER else _required_number(row, verdict)
    if seen not in values:
        raise BadRow(verdict, f"must be one of {', '.join(map(str, values))}", repr(seen)[:40])
    return values[seen]


def _required_number(row: Columns, key: str) -> float:
    if (number := number_field(row, key)) is None:
        raise BadRow(key, "must be a number, is null")
    return number


def _preference_prompt(row: Columns, key: str) -> object:
    """The prompt under a column; of WebGPT's and summarize_from_feedback's objects its text."""
    value = row[key]
    if key == "question" and isinstance(value, dict):
        return text_field(value, "full_text")
    return _post(object_field(row, key)) if key == "info" else value


def _post(info: Columns) -> str:
    """The text to summarize, as the policy of the paper got it.

    Source: Stiennon et al. 2020, arXiv:2009.01325, appendix B.
    """
    if info.get("post") is None:
        return text_field(info, "article") + "\n\nTL;DR:"
    heads = {"SUBREDDIT: r/": "subreddit", "TITLE: ": "title"}
    parts = [head + text_field(info, key) for head, key in heads.items() if info.get(key)]
    return "\n\n".join([*parts, "POST: " + text_field(info, "post"), "TL;DR:"])


def _before_reply(dialogue: object) -> object:
    return dialogue[:-1] if isinstance(dialogue, list) else dialogue


def _summaries(row: Columns) -> Columns:
    """The two summaries of a post in columns of their own."""
    if not {"info", "choice"} <= row.keys():
        return row
    summaries = objects_field(row, "summaries")
    if len(summaries) != 2:
        raise BadRow("summaries", "must be two", f"{len(summaries)} given")
    named = {f"summary_{number}": text_field(summary, "text") for number, summary in enumerate(summaries)}
    return {**{name: value for name, value in row.items() if name != "summaries"}, **named}


def _battle(row: Columns) -> Columns:
    """The dialogues of two models, whose turns are lists as JSON text in three columns."""
    if not {"prompt", "response_a", "response_b", "winner_model_b"} <= row.keys():
        return row
    named = {name: value for name, value in row.items() if name not in ("prompt", "response_a", "response_b")}
    asked = _texts(row, "prompt")
    for model in ("a", "b"):
        answers = _texts(row, f"response_{model}")
        if len(answers) != len(asked):
            raise BadRow(f"response_{model}", "must be as many as the turns of prompt")
        turns = zip(asked, answers, strict=True)
        named[f"conversation_{model}"] = [{"input": text, "output": answer} for text, answer in turns]
    return named


def _texts(row: Columns, key: str) -> list[object]:
    value = row[key]
    if isinstance(value, str):
        value = decoded(value, key, key, "must be a list as JSON")
    return list_field({key: value}, key)


def _several_sides(row: Columns) -> Columns:
    """Several right and several wrong responses as a ranking (RewardBench 2)."""
    sides = {key: row.get(key) for key in ("chosen", "rejected")}
    if not all(isinstance(side, list) and side and isinstance(side[0], str) for side in sides.values()):
        return row
    right, wrong = (list_field(row, key) for key in sides)
    named = {name: value for name, value in row.items() if name not in sides}
    return {**named, "responses": [*right, *wrong], "ranks": [0] * len(right) + [1] * len(wrong)}


def _calls(row: Columns) -> Columns:
    """A question and the tool calls that answer it, as messages (xLAM)."""
    if not {"query", "tools"} <= row.keys() or not isinstance(row["answers"], str):
        return row
    calls = decoded(row["answers"], "answers", "answers", "must be a list of tool calls as JSON")
    named = {name: value for name, value in row.items() if name not in ("query", "answers")}
    user = {"role": "user", "content": row["query"]}
    return {**named, "messages": [user, {"role": "assistant", "content": "", "tool_calls": calls}]}


def _first_turn(row: Columns) -> Columns:
    """The first of several questions as the prompt; the others stay beside it (MT-Bench)."""
    turns = row["turns"]
    if "prompt" in row or not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        return row
    return {**row, "prompt": turns[0]}


def _renamed_sides(row: Columns) -> Columns:
    """A pair whose prompt or responses have another name only (UltraInteract, LLaMA-Factory)."""
    names = {"trajectory": "prompt", "chosen_messages": "chosen", "rejected_messages": "rejected"}
    named = {names.get(name, name): value for name, value in row.items()}
    return named if len(named) == len(row) and {"chosen", "rejected"} <= named.keys() else row


VERDICTS = {verdict for _, _, _, verdict, _ in PREFERENCES}
COLUMNS = {name for entry in PREFERENCES for name in entry if isinstance(name, str) and name}
OTHER_SETS: dict[str, Callable[[Columns], Columns]] = {  # by a column
    "summaries": _summaries,
    "winner_model_a": _battle,
    "chosen": _several_sides,
    "answers": _calls,
    "turns": _first_turn,
    "trajectory": _renamed_sides,
    "chosen_messages": _renamed_sides,
}


# Pairs of texts and choices


def pair_rows(row: Columns) -> list[Columns]:
    """The row with `text` and `pair`, where it has the two texts under other names."""
    names = next((names for names in PAIRS if row.keys() >= set(names) and "text" not in row), None)
    return [row] if names is None else [{**row, "text": row[names[0]], "pair": row[names[1]]}]


def choice_rows(row: Columns) -> list[Columns]:
    """The rows `context`, `choices` and `label` of a row of RACE, COPA, StoryCloze or SWAG."""
    text = row.get("text")
    if len(row) == 1 and isinstance(text, str) and text.startswith("{"):  # a file of RACE is one object, named .txt
        row = decoded(text, "text", "the whole file", "is not JSON")
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
