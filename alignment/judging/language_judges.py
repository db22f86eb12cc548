"""Language models as judges: one of our own by the log-probabilities of its answers, or one behind a URL."""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

from alignment.data.rows.records import Messages
from alignment.data.text.chat import prompt_ids, response_ids
from alignment.judging.config import EndpointConfig
from alignment.judging.likelihood import TOKENS_PER_FORWARD, LanguageScorer
from alignment.judging.logged_judge import Ask, Call, Done, JudgeAnswer
from alignment.judging.templates import read_answer
from alignment.loading import load_on_best_device, load_tokenizer
from alignment.models.model import check_lengths
from alignment.models.weights_config import WeightsConfig
from alignment.ragged import group_by_length
from alignment.rewards.judge import RequestFailed, send_json
from alignment.statistics.winrate import LOSS, TIE, WIN

# The protocol's names -> a row's.
TOKEN_COUNTS = {"prompt_tokens": "prompt_tokens", "completion_tokens": "answer_tokens"}
WAY_OUT = "shorten prompts and responses (max_new_tokens), or let a model with more positions judge"
SHOWN_CHARACTERS = 500  # of an answer that cannot be read

# What is asked, and how an answer is read


@dataclass(frozen=True)
class Question:
    """The words of a call, and what its possible answers stand for.

    Attributes:
        text: call -> the question.
        labels: answer -> verdict for the first response, or rating.
        tie_margin: largest difference of the probabilities of two responses that is a tie.
    """

    text: Callable[[Call], str]
    labels: Mapping[str, float]
    tie_margin: float = 0.0

    def answer_of(self, log_probs: Mapping[str, float], **more: object) -> JudgeAnswer:
        """The verdict of greater probability, or the mean rating, from labels' log-probabilities up to a constant.

        Source: of the mean rating: Liu et al. 2023, arXiv:2303.16634, eq. 1.
        """
        top = max(log_probs.values())
        shares = {label: math.exp(value - top) for label, value in log_probs.items()}
        total = sum(shares.values())
        mean = sum(self.labels[label] * share for label, share in shares.items()) / total
        if "A" not in self.labels:
            return JudgeAnswer(mean, more)
        lead = (shares.get("A", 0.0) - shares.get("B", 0.0)) / total
        tied = abs(lead) <= self.tie_margin or shares.get("C", 0.0) > max(shares.get("A", 0.0), shares.get("B", 0.0))
        return JudgeAnswer(TIE if tied else WIN if lead > 0 else LOSS, {"probability": mean, **more})


# A service


def ask_service(
    service: EndpointConfig,
    message_of: Callable[[Call], str | Messages],
    settings: Mapping[str, object],
    read: Callable[[object], JudgeAnswer],
) -> Ask:
    """Calls of a chat model behind a URL, `service.requests` at the same time.

    Args:
        message_of: call -> the user's message, or a dialogue.
        settings: parameters of the request, in whose place those of the config count.
        read: decoded JSON of an answer -> the answer.
    """

    def one(call: Call) -> JudgeAnswer:
        said = message_of(call)
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        given = {"model": service.model, "messages": messages, **settings, **service.parameters}
        body = json.dumps({key: value for key, value in given.items() if value is not None})
        started = time.monotonic()
        try:
            received = send_json(service, body.encode())
        except RequestFailed as error:
            return JudgeAnswer(None, failure=str(error))
        answer = read(received)
        counts = {ours: part_of(received, "usage", name) for name, ours in TOKEN_COUNTS.items()}
        tokens = {ours: count for ours, count in counts.items() if isinstance(count, int)}
        return answer._replace(more={"seconds": round(time.monotonic() - started, 3), **tokens, **answer.more})

    def ask(calls: Sequence[Call], done: Done) -> None:
        stopped = threading.Event()

        def make(call: Call) -> None:
            if not stopped.is_set() and not done(call, one(call)):
                stopped.set()

        with ThreadPoolExecutor(service.requests) as pool:
            try:
                list(pool.map(make, calls))
            finally:
                stopped.set()  # what has not begun by now never does

    return ask


def ask_endpoint(service: EndpointConfig, question: Question) -> Ask:
    """Calls of a judge behind a URL."""

    def read(received: object) -> JudgeAnswer:
        text = chat_text(received)
        label = None if text is None or service.logprobs else read_answer(text, list(question.labels))
        if label is not None:
            return JudgeAnswer(question.labels[label])
        log_probs = _first_token(received) if service.logprobs else {}
        if known := {label: log_probs[label] for label in question.labels if label in log_probs}:
            return question.answer_of(known)
        return JudgeAnswer(None, {"unread": (text or json.dumps(received))[-SHOWN_CHARACTERS:]})

    settings: dict[str, object] = {"temperature": 0, "max_tokens": service.max_tokens}
    if service.logprobs:
        settings |= {"logprobs": True, "top_logprobs": 20, "max_tokens": 1}
    return ask_service(service, question.text, settings, read)


def part_of(received: object, *path: str | int) -> object:
    """The value at a path of keys and indices in decoded JSON; None where there is none."""
    for key in path:
        try:
            received = received[key]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return None
    return received


def chat_text(received: object) -> str | None:
    """The text of a chat completion; None where there is none."""
    text = part_of(received, "choices", 0, "message", "content")
    return text if isinstance(text, str) else None


def _first_token(received: object) -> dict[str, float]:
    """Log-probability of what the first token may be, without blanks and in capitals, the likeliest of equal ones.

    What is no finite number is left out.
    """
    candidates = part_of(received, "choices", 0, "logprobs", "content", 0, "top_logprobs")
    given = (
        [(part_of(candidate, "token"), part_of(candidate, "logprob")) for candidate in candidates]
        if isinstance(candidates, list)
        else []
    )
    known = [(token, value) for token, value in given if isinstance(value, (int, float)) and abs(value) < 1e300]
    pairs = [(str(token).strip().upper(), float(value)) for token, value in known]
    return dict(sorted(pairs, key=lambda pair: pair[1]))


# A language model of our own


def ask_model(source: str, question: Question, weights: WeightsConfig) -> Ask:
    """Calls of a language model, loaded at the first of them: the log-probability of each label after the question.

    The question is a user's message where the tokenizer has a chat template; else a text that ends in `Answer:`.
    """

    @cache
    def load() -> LanguageScorer:
        return LanguageScorer(load_on_best_device(source, weights), load_tokenizer(source))

    def ask(calls: Sequence[Call], done: Done) -> None:
        scorer = load()
        names = list(question.labels)
        tokenizer = scorer.tokenizer
        chat = scorer.tokenizer.chat_template is not None
        heads = [
            prompt_ids(tokenizer, [{"role": "user", "content": text}] if chat else f"{text}\n\nAnswer:")
            for text in map(question.text, calls)
        ]
        labels = [response_ids(tokenizer, name if chat else f" {name}", ended=False) for name in names]
        lengths = [len(head) + sum(map(len, labels)) for head in heads]
        rows = [(call.prompt.row_id, length) for call, length in zip(calls, lengths, strict=True)]
        check_lengths(scorer.model, rows, WAY_OUT)
        for group in group_by_length(lengths, TOKENS_PER_FORWARD):
            requests = [(heads[i], label) for i in group for label in labels]
            asked = [calls[i].prompt.row_id for i in group for _ in labels]
            log_probs = [likelihood.log_prob for likelihood in scorer.token_likelihoods(requests, asked.__getitem__)]
            for place, i in enumerate(group):
                row = log_probs[place * len(names) : (place + 1) * len(names)]
                done(calls[i], question.answer_of(dict(zip(names, row, strict=True))))

    return ask
