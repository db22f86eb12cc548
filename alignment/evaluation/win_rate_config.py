"""Settings of win rates: who takes part, and what is measured. The judge's are in judge_config.py."""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Interval

from alignment.data.config import DataConfig
from alignment.evaluation.judge_config import EndpointConfig, JudgeConfig
from alignment.settings import NonNegativeFloat, NonNegativeInt, PositiveInt, Rule, Settings


@dataclass(frozen=True)
class BestOfConfig(Settings):
    """A policy's best of n as one more contestant: of its n responses to each prompt the one that a reward model scores highest.

    Attributes:
        policy: name among `models`.
        reward_model: directory of the reward model that chooses; of equal scores the first response is taken.
        samples: n, at least 2: the best of one is the policy itself.
    """

    policy: str
    reward_model: str
    samples: Annotated[int, Interval(ge=2)] = 16


@dataclass(frozen=True, kw_only=True)
class WinRateConfig(JudgeConfig):
    """Settings of a comparison of policies.

    Attributes:
        models: name -> directory or Hub name; an adapter's directory too.
        baseline: the name of the contestant that the others are compared with.
        data: prompts; those longer than `data.max_length` tokens are truncated on the left.
        output: directory of the results, and of the responses and judgments, which a later start reads again.
        labels: file of verdicts of people on some of the items, such as a form that was filled in or labels.jsonl: beside the
            judge's win rate, `by_people` is the one corrected by them.
        reference: name among `models` to measure the KL from; None: the baseline. KL is measured only between models
            with the same vocabulary.
        text: held-out running text for each model's language-model loss.
        comparisons: held-out comparisons, on which the log-probability of the chosen and of the rejected response is
            measured, and its change since the reference; for models with the reference's vocabulary.
        best_of: name -> best of n responses of one of the models, judged beside them. Its `kl` is the bound
            log n - (n - 1) / n, given where its policy is the reference; it has no language-model loss of its own.
        response_files: name -> file of responses that are there already, rows of demonstrations (prompt and response),
            which are found by their prompts.
        endpoints: name -> a chat model behind a URL.
        max_new_tokens, temperature, top_p, seed: of the sampling.
        batch_size: responses sampled at the same time.
        samples: prompts kept with every model's response.
        chat_template: of the models, a built-in one's name or a Jinja file; None: each tokenizer's own.
    """

    models: dict[str, str] = field(default_factory=dict)
    baseline: str
    data: DataConfig
    output: str
    labels: str | None = None
    reference: str | None = None
    text: DataConfig | None = None
    comparisons: DataConfig | None = None
    best_of: dict[str, BestOfConfig] = field(default_factory=dict)
    response_files: dict[str, str] = field(default_factory=dict)
    endpoints: dict[str, EndpointConfig] = field(default_factory=dict)
    max_new_tokens: PositiveInt = 64
    temperature: NonNegativeFloat = 1.0
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    batch_size: PositiveInt = 256
    seed: NonNegativeInt = 0
    samples: NonNegativeInt = 8
    chat_template: str | None = None

    RULES = (
        Rule("baseline", lambda c: c.baseline not in c.contestants, "{self.baseline!r} is not among the models"),
        Rule("reference", lambda c: c.measured_from not in (None, *c.models),
             "{self.reference!r} is not among the models"),
        Rule("comparisons", lambda c: c.comparisons is not None and c.measured_from is None,
             "are measured from a reference; name one among the models"),
        Rule("best_of", lambda c: [name for name in c.best_of if name in c.models],
             "has names of models too, {found}; take others"),
        Rule("response_files", lambda c: len(set(c.contestants)) < len(c.contestants),
             "and endpoints have names of other contestants too; take others"),
        Rule("best_of", lambda c: [own.policy for own in c.best_of.values() if own.policy not in c.models],
             "names policies that are not among the models: {found}"),
        Rule("best_of", lambda c: c.best_of and c.temperature == 0,
             "needs a temperature above 0: the n responses to a prompt would all be the same"),
    )  # fmt: skip

    @property
    def contestants(self) -> list[str]:
        """Names of all whose responses are judged."""
        return [*self.models, *self.best_of, *self.response_files, *self.endpoints]

    @property
    def measured_from(self) -> str | None:
        """The name of the model that KL and log-probabilities are measured from; None: there is none."""
        return self.baseline if self.reference is None and self.baseline in self.models else self.reference

    def policy_of(self, name: str) -> str | None:
        """Directory or Hub name of the model whose responses a contestant gives; None where none of ours does."""
        return self.models.get(self.best_of[name].policy if name in self.best_of else name)
