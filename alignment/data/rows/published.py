"""Rows of data sets as they are published, under our column names: preferences, GLUE's pairs, sets of multiple choice.

A row is recognized by its columns; a row of other columns is left as it is.
"""

from collections.abc import Callable, Mapping
from typing import Any

from alignment.data.rows.fields import (
    BadRow,
    decoded,
    list_field,
    number_field,
    object_field,
    objects_field,
    required_number,
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

TLDR = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"  # Stiennon et al. 2020, appendix B
# Verdict -> how far the second response leads: below 0 the first is better, at 0 neither is
BETTER = {0: -1, 1: 1}
STRENGTH = {strength: strength for strength in range(-3, 4)}
WINNER = {"model_a": -1, "model_b": 1, "tie": 0, "tie (bothbad)": 0, "both_bad": 0}
BATTLE = ("prompt", "response_a", "response_b")
Preference = tuple[str, str, str, str, Mapping[Any, int] | str]
PREFERENCES: tuple[Preference, ...] = (
    # prompt, first response, second response, verdict, and its values, or the column that it is compared with;
    # in place of the prompt the first response, where both are dialogues with it
    ("prompt", "response_0", "response_1", "better_response_id", BETTER),  # PKU-SafeRLHF
    ("history", "human_ref_A", "human_ref_B", "labels", {1: -1, 0: 1}),  # SHP
    ("prompt", "response_1", "response_2", "preference_strength", STRENGTH),  # HelpSteer2
    ("context", "response1", "response2", "overall_preference", STRENGTH),  # HelpSteer3
    ("question", "answer_0", "answer_1", "score_0", "score_1"),  # WebGPT
    ("prompt", "summary_0", "summary_1", "choice", BETTER),  # of `_summaries`
    ("conversation_a", "conversation_a", "conversation_b", "winner", WINNER),  # Chatbot Arena
    (*BATTLE, "winner_model_a", "winner_model_b"),
)
PARTED = "the two dialogues part before their last replies, so these answer different prompts"


# Preferences and tool calls


def published_row(row: Columns) -> Columns:
    """The row under our column names, where it is one of a published set of preferences or tool calls."""
    for columns, read in OTHER_SETS.items():
        if row.keys() >= columns:
            row = read(row)
    if {"chosen", "rejected"} <= row.keys():
        return row
    entry = next((entry for columns, entry in PREFERENCE_COLUMNS.items() if row.keys() >= columns), None)
    return row if entry is None else _pair(row, entry)


def _pair(row: Columns, preference: Preference) -> Columns:
    """The pair with the better response as `chosen`."""
    prompt, first, second, verdict, values = preference
    if isinstance(values, str):
        lead = required_number(row[values], values) - required_number(row[verdict], verdict)
    else:
        seen = text_field(row, verdict) if values is WINNER else required_number(row[verdict], verdict)
        if seen not in values:
            raise BadRow(verdict, f"must be one of {', '.join(map(str, values))}", repr(seen)[:40])
        lead = values[seen]
    chosen, rejected = (second, first) if lead > 0 else (first, second)
    pair = {"chosen": row[chosen], "rejected": row[rejected]}
    if prompt != first:
        asked = row[prompt]
        pair["prompt"] = text_field(asked, "full_text") if isinstance(asked, dict) else asked
    elif list_field(row, first)[:-1] != list_field(row, second)[:-1]:
        raise SkippedRow(PARTED)
    if values is STRENGTH:
        pair["margin"] = abs(lead)
    if not lead:
        pair[TIED] = True
    return {**_without(row, prompt, first, second, verdict, str(values)), **pair}


def _is_column(part: object) -> bool:
    return isinstance(part, str)


def _without(row: Columns, *names: str) -> Columns:
    return {name: value for name, value in row.items() if name not in names}


def _summaries(row: Columns) -> Columns:
    """A post, as the policy got it, with its two summaries (summarize_from_feedback)."""
    info = object_field(row, "info")
    if info.get("post") is None:
        prompt = text_field(info, "article") + "\n\nTL;DR:"
    else:
        prompt = TLDR.format(**{name: text_field(info, name) for name in ("subreddit", "title", "post")})
    named = {f"summary_{index}": summary.get("text") for index, summary in enumerate(objects_field(row, "summaries"))}
    return {**_without(row, "info", "summaries"), "prompt": prompt, **named}


def _battle(row: Columns) -> Columns:
    """One question and the answers of two models, each in a list as JSON text (Chatbot Arena, 55,000 battles)."""
    texts = {name: decoded(row[name], name, name, "must be a list as JSON") for name in BATTLE}
    if any(len(list_field(texts, name)) > 1 for name in BATTLE):
        raise SkippedRow(PARTED)
    replies = {name: texts[name][0] for name in BATTLE[1:]}
    return {**row, **texts, **replies}


def _several_sides(row: Columns) -> Columns:
    """Several right and several wrong responses as a ranking (RewardBench 2)."""
    chosen = row["chosen"]
    if not isinstance(chosen, list) or not all(isinstance(text, str) for text in chosen):
        return row
    responses = [*chosen, *list_field(row, "rejected")]
    ranks = [int(index >= len(chosen)) for index in range(len(responses))]
    return {**_without(row, "chosen", "rejected"), "responses": responses, "ranks": ranks}


def _calls(row: Columns) -> Columns:
    """A question and the tool calls that answer it, as messages (xLAM)."""
    calls = decoded(row["answers"], "answers", "answers", "must be a list of tool calls as JSON")
    messages = [{"role": "user", "content": row["query"]}, {"role": "assistant", "tool_calls": calls}]
    return {**_without(row, "query", "answers"), "messages": messages}


def _renamed_sides(row: Columns) -> Columns:
    """A pair whose prompt or responses have another name only."""
    names = {"trajectory": "prompt", "chosen_messages": "chosen", "rejected_messages": "rejected"}
    return {names.get(name, name): value for name, value in row.items()}


PREFERENCE_COLUMNS = {frozenset(filter(_is_column, preference)): preference for preference in PREFERENCES}
OTHER_SETS: dict[frozenset[str], Callable[[Columns], Columns]] = {
    frozenset(("info", "summaries", "choice")): _summaries,
    frozenset((*BATTLE, "winner_model_a")): _battle,
    frozenset(("chosen", "rejected")): _several_sides,
    frozenset(("query", "answers", "tools")): _calls,
    frozenset(("trajectory", "chosen", "rejected")): _renamed_sides,  # UltraInteract
    frozenset(("chosen_messages", "rejected_messages")): _renamed_sides,  # LLaMA-Factory
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
    return [_race_question(article, *parts) for parts in zip(questions, options, answers, strict=True)]


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
    context = " ".join(text_field(row, f"InputSentence{index}") for index in range(1, 5))
    choices = [row.get(f"RandomFifthSentenceQuiz{index}") for index in (1, 2)]
    return [{"context": context, "choices": choices, "label": answer - 1}]


def _swag(row: Columns) -> list[Columns]:
    """A sentence, and the beginning of the next with four endings.

    Source: Zellers et al. 2018, arXiv:1808.05326; the split is that of Devlin et al. 2019, arXiv:1810.04805, section
    4.4.
    """
    choices = [f"{text_field(row, 'sent2')} {text_field(row, f'ending{index}')}" for index in range(4)]
    return [{**row, "context": text_field(row, "sent1"), "choices": choices}]


CHOICE_SETS: dict[str, Callable[[Columns], list[Columns]]] = {  # by a column that no other set has
    "article": _race,
    "choice1": _copa,
    "InputSentence1": _story_cloze,
    "sent1": _swag,
}
