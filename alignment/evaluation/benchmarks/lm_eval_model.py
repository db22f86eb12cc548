"""Our models behind lm-eval's interface, so that its tasks run on them; imported only where `lm_eval` names tasks.

Responses one after the other with equal settings are decoded side by side. lm-eval renders dialogues itself, by
`apply_chat_template`.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from typing import Any, Protocol

from jinja2 import TemplateError

from alignment.errors import UserError
from alignment.generation import SamplingConfig
from alignment.judging.likelihood import LanguageScorer

LM: Any = importlib.import_module("lm_eval.api.model").LM  # without types of its own that a checker could read
NEW_TOKENS = 256  # where a task says nothing, as for lm-eval's own backends
# The first of them that is given counts.
SIZES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class Instance(Protocol):
    """A request of lm-eval."""

    args: tuple[Any, ...]  # context and continuation; a text; context and settings of the response


class LMEvalModel(LM):
    """A model as lm-eval asks it: log-probabilities of continuations and of texts, and responses."""

    def __init__(self, scorer: LanguageScorer):
        super().__init__()
        self.scorer = replace(scorer, chat=False)

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm-eval keeps requests."""
        return self.scorer.tokenizer.name_or_path.replace("/", "__")

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy decoding gives it."""
        return [*self.scorer.likelihoods([(request.args[0], request.args[1]) for request in requests])]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Log-probability of each whole text."""
        return self.scorer.text_log_probs([request.args[0] for request in requests])

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """A response to each context, cut before the first stop text; settings count as for lm-eval's own backends.

        Raises:
            UserError: a task samples (`do_sample`) without a temperature.
        """
        responses = list[str]()
        for settings, group in groupby(requests, key=lambda request: request.args[1]):
            samples = settings.get("do_sample")
            temperature = 0.0 if samples is False else settings.get("temperature") or 0.0
            if samples and not temperature:
                raise UserError(
                    "lm_eval: a task has do_sample without a temperature; write it into its generation_kwargs"
                )
            sizes = [settings[name] for name in SIZES if settings.get(name) is not None]
            until = settings.get("until") or []
            responses += self.scorer.responses(
                [request.args[0] for request in group],
                SamplingConfig([*sizes, NEW_TOKENS][0], temperature, top_p=settings.get("top_p", 1.0)),
                [until] if isinstance(until, str) else until,
            )
        return responses

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a dialogue, whose last message stays open where there is no generation prompt.

        It is the beginning of the answer then. A template that refuses a system message is given the dialogue without
        it, as lm-eval does.
        """
        render = partial(
            self.scorer.tokenizer.apply_chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        try:
            return render(list(chat_history))
        except TemplateError as error:
            others = [message for message in chat_history if message["role"] != "system"]
            _tell(f"lm_eval: the chat template refuses a message ({error}); system messages are left out")
            return render(others)


@cache
def _tell(text: str) -> None:
    """Print a line on standard error, once."""
    print(text, file=sys.stderr)


def task_runner(
    tasks: Sequence[str], include_path: str | None, *, max_rows: int | None, shots: int | None
) -> Callable[[LanguageScorer], dict[str, dict[str, object]]]:
    """A function that gives lm-eval's own results of its tasks for a model: task -> metric -> value.

    Args:
        include_path: folder of further tasks.

    Raises:
        UserError: one of the tasks is not there.
    """
    manager = importlib.import_module("lm_eval.tasks").TaskManager(include_path=include_path)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise UserError(
            f"lm_eval: there is no task {', '.join(unknown)}; `lm-eval ls tasks` lists them, or set include_path"
        )
    evaluate = importlib.import_module("lm_eval").simple_evaluate
    return lambda scorer: evaluate(
        model=LMEvalModel(scorer),
        tasks=list(tasks),
        task_manager=manager,
        limit=max_rows,
        num_fewshot=shots,
        apply_chat_template=scorer.chat,
        log_samples=False,
        bootstrap_iters=0,
    )["results"]
