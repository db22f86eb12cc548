"""Our models behind lm-eval's interface, so that its tasks run on them; imported only where `lm_eval` names tasks."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from alignment.errors import UserError
from alignment.evaluation.benchmarks.likelihood import LanguageScorer
from alignment.generation import SamplingConfig

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance


class LMEvalModel(TemplateLM):
    """A model as lm-eval asks it: log-probabilities of continuations and of texts, and greedy or sampled responses."""

    def __init__(self, scorer: LanguageScorer):
        super().__init__()
        self.scorer, self.tokenizer = scorer, scorer.tokenizer

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        end = self.scorer.tokenizer.eos_token_id
        return self.scorer.first_token if end is None else end

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm-eval caches requests."""
        return self.scorer.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """Tokens of a text."""
        return self.scorer.context_ids([string])[0]

    def _loglikelihood_tokens(self, requests, **kwargs: object) -> list[tuple[float, bool]]:
        encoded = [(context, tail) for _, context, tail in requests]
        return [tuple(found) for found in self.scorer.token_likelihoods(encoded, self.scorer.sharing)]

    def loglikelihood(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy decoding gives it."""
        return [tuple(found) for found in self.scorer.likelihoods([request.args for request in requests])]

    def loglikelihood_rolling(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text."""
        return self.scorer.text_log_probs([request.args[0] for request in requests])

    def generate_until(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[str]:
        """A response to each context, cut before the first stop text."""
        found = dict[int, str]()
        for kind in {str(request.args[1]) for request in requests}:
            numbers = [number for number, request in enumerate(requests) if str(request.args[1]) == kind]
            settings = normalize_gen_kwargs(requests[numbers[0]].args[1], 256)
            sampling = SamplingConfig(
                settings["max_gen_toks"], settings.get("temperature", 0.0), top_p=settings.get("top_p", 1.0)
            )
            stop = [text for text in handle_stop_sequences(settings.get("until"), eos=None) if text]
            texts = self.scorer.responses([requests[number].args[0] for number in numbers], sampling, stop)
            found |= zip(numbers, texts, strict=True)
        return [found[number] for number in range(len(requests))]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a dialogue."""
        return self.scorer.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )


def check_tasks(tasks: Sequence[str], include_path: Path | None) -> TaskManager:
    """lm-eval's index of tasks, and of those in a folder; UserError where one of `tasks` is not among them."""
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise UserError(
            f"lm_eval: lm-eval has no task {', '.join(unknown)}; see `lm-eval ls tasks`, or set include_path"
        )
    return manager


def run_tasks(
    scorer: LanguageScorer, tasks: Sequence[str], manager: TaskManager, *, max_rows: int | None, shots: int | None
) -> dict[str, dict[str, object]]:
    """lm-eval's own results of its tasks on a model: task -> metric -> value."""
    found = simple_evaluate(
        model=LMEvalModel(scorer), tasks=list(tasks), task_manager=manager, limit=max_rows, num_fewshot=shots,
        log_samples=False, apply_chat_template=scorer.chat, bootstrap_iters=0,
    )  # fmt: skip
    assert found is not None
    return found["results"]
