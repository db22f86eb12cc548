"""Settings of judges, the same for win rates, tournaments and judges held against people; and those of win rates."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from annotated_types import Interval

from alignment.data.config import DataConfig
from alignment.judging.templates import TEMPLATES, is_rubric
from alignment.models.weights_config import WeightsConfig
from alignment.rewards.specs import ServiceSpec
from alignment.settings import NonNegativeFloat, NonNegativeInt, PositiveInt, Rule, Settings, Share

JUDGES = Literal["gold", "reward_model", "model", "endpoint", "longer", "verdicts"]


@dataclass(frozen=True, kw_only=True)
class EndpointConfig(ServiceSpec):
    """A chat model behind OpenAI's protocol, as a judge or as a contestant.

    Attributes:
        url: of `.../v1/chat/completions`.
        model: its name there.
        max_tokens: longest answer of a judge; a contestant's is max_new_tokens.
        reasons: a judge writes its reasons before its answer; raise max_tokens for it.
        logprobs: a judge's verdict is read from the log-probabilities of the first token and not from the text, where
            the service gives them (20 top_logprobs).
        parameters: further parameters of the request; null leaves one of ours out.
        input_price, output_price: of a million tokens, in any currency, to foretell and sum up the cost; None: not
            told.
    """

    model: str
    max_tokens: PositiveInt = 16
    reasons: bool = False
    logprobs: bool = False
    parameters: dict[str, bool | int | float | str | None] = field(default_factory=dict)
    input_price: NonNegativeFloat | None = None
    output_price: NonNegativeFloat | None = None

    RULES = (
        Rule(
            "logprobs", lambda c: c.logprobs and c.reasons, "reads the first token, where reasons would begin; take one"
        ),
        Rule(
            "input_price",
            lambda c: (c.input_price is None) != (c.output_price is None),
            "and output_price must be given together",
        ),
    )

    def cost(self, input_tokens: int, output_tokens: int) -> float | None:
        """The price of so many tokens; None where no prices are given."""
        if self.input_price is None or self.output_price is None:
            return None
        return (self.input_price * input_tokens + self.output_price * output_tokens) / 1e6


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(Settings):
    """Who judges, and how: a base class of every config that has a judge.

    Attributes:
        judge: required. reward_model (given as `reward_model` or several as `reward_models`), model (a language model
            by the log-probabilities of its answers, given as `judge_model`), endpoint (a chat model behind a URL),
            verdicts (a file filled in by people or another program), longer (the longer response: a baseline for
            judges), gold (the true reward of the hotel data set, for its prompts only).
        reward_model: directory of the judging reward model; with another judge it gives each model's mean proxy score.
        reward_models: directories of several, for judge=reward_model: the verdict is that of most of them, and the win
            rate by each is told beside it.
        judge_model: directory or Hub name of the judging language model; its own chat template is used where it has
            one.
        endpoint: the service of judge=endpoint.
        verdicts: file of verdicts for judge=verdicts; if it does not exist, it is written as a form to fill in. The
            next start reads the responses that were shown, whatever its seed and weights.
        judge_template: of the question to a language model: pairwise, summary (two responses, one letter), rubric,
            summary_rubric (one response, 1 to 7; the higher rating wins), or a file with {prompt}, {first} and
            {second}, or with {prompt} and {response}.
        ties: a language model may call a tie.
        tie_margin: largest difference of scores, ratings or probabilities that is a tie.
        max_failed_share: largest share of items that the judge may fail on; the others are then judged alone.
        weights: type that models are held and compute in; auto: each checkpoint's.
    """

    judge: JUDGES | None = None
    reward_model: str | None = None
    reward_models: tuple[str, ...] = ()
    judge_model: str | None = None
    endpoint: EndpointConfig | None = None
    verdicts: str | None = None
    judge_template: str = "pairwise"
    ties: bool = False
    tie_margin: NonNegativeFloat = 0.0
    max_failed_share: Share = 0.1
    weights: WeightsConfig = field(default_factory=WeightsConfig)

    RULES = (
        Rule(
            "judge",
            lambda c: c.judge is None,
            "is missing; say who judges: judge=reward_model with reward_model=DIR (one that no policy was trained "
            "against), judge=model with judge_model=DIR (a language model), judge=endpoint with endpoint.url and "
            "endpoint.model, judge=verdicts with verdicts=FILE (filled in by people), or judge=longer (the longer "
            "response wins); judge=gold is for prompts of the generated hotel world alone",
        ),
        Rule(
            "reward_model",
            lambda c: c.judge == "reward_model" and c.reward_model is None and not c.reward_models,
            "must be a directory, the judge's",
        ),
        Rule(
            "reward_models",
            lambda c: c.reward_models and (c.judge != "reward_model" or len(set(c.reward_models)) < 2),
            "are two or more different directories, for judge=reward_model",
        ),
        Rule("judge_model", lambda c: c.judge == "model" and c.judge_model is None, "must be a directory, the judge's"),
        Rule(
            "endpoint", lambda c: c.judge == "endpoint" and c.endpoint is None, "must be a section with url and model"
        ),
        Rule("verdicts", lambda c: c.judge == "verdicts" and c.verdicts is None, "must be a file, of the verdicts"),
        Rule(
            "judge_template",
            lambda c: c.ties and is_rubric(TEMPLATES.get(c.judge_template, "")),
            "{self.judge_template} rates one response, and has no ties of its own; leave ties out",
        ),
    )

    @property
    def judging_models(self) -> tuple[str, ...]:
        """Directories or Hub names of the models that judge."""
        given = {"model": self.judge_model, "reward_model": self.reward_model}.get(str(self.judge))
        return self.reward_models or ((given,) if given is not None else ())

    @property
    def scoring_models(self) -> list[str]:
        """Directories of all reward models that score: the judges, and the one of the mean proxy score."""
        return list(dict.fromkeys([*self.reward_models, *filter(None, [self.reward_model])]))


@dataclass(frozen=True)
class BestOfConfig(Settings):
    """A policy's best of n as one more contestant: of n responses to each prompt the one a reward model scores highest.

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
        models: name -> directory or Hub name; an adapter's directory too. Or a list of them, one for each seed of its
            training: each is sampled and judged, and the win rate is over prompts and seeds. All lists have one length:
            the first of one meets the first of the baseline's list; a single checkpoint meets each.
        baseline: the name of the contestant that the others are compared with.
        data: prompts; those longer than `data.max_length` tokens are truncated on the left.
        output: directory of the results, and of the responses and judgments, which a later start reads again.
        labels: file of verdicts of people on some of the items, such as a form that was filled in or labels.jsonl:
            beside the judge's win rate, `by_people` is the one corrected by them.
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

    models: dict[str, str | list[str]] = field(default_factory=dict)
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
        Rule(
            "models",
            lambda c: [] in c.models.values() or len(c.seed_counts) > 1,
            "has lists of different lengths, {self.models}; give each list one checkpoint for each of the same seeds",
        ),
        Rule("baseline", lambda c: c.baseline not in c.contestants, "{self.baseline!r} is not among the models"),
        Rule(
            "reference",
            lambda c: c.measured_from not in (None, *c.models),
            "{self.reference!r} is not among the models",
        ),
        Rule(
            "comparisons",
            lambda c: c.comparisons is not None and c.measured_from is None,
            "are measured from a reference; name one among the models",
        ),
        Rule(
            "models",
            lambda c: sorted({name for name in c.contestants if c.contestants.count(name) > 1}),
            "best_of, response_files and endpoints share the names {found}; take others",
        ),
        Rule(
            "best_of",
            lambda c: [best_of.policy for best_of in c.best_of.values() if best_of.policy not in c.models],
            "names policies that are not among the models: {found}",
        ),
        Rule(
            "best_of",
            lambda c: c.best_of and c.temperature == 0,
            "needs a temperature above 0: the n responses to a prompt would all be the same",
        ),
    )

    @property
    def contestants(self) -> list[str]:
        """Names of all whose responses are judged."""
        return [*self.models, *self.best_of, *self.response_files, *self.endpoints]

    @property
    def seed_counts(self) -> set[int]:
        """Lengths of the lists among the models."""
        return {len(sources) for sources in self.models.values() if isinstance(sources, list)}

    def names_of(self, name: str) -> list[str]:
        """Names of a contestant's checkpoints: `NAME, seed 1` and on where its model is a list, else its name alone."""
        sources = self.sources_of(name)
        return [f"{name}, seed {i + 1}" for i in range(len(sources))] if isinstance(sources, list) else [name]

    def by_checkpoint(self, seed: int = 0) -> "WinRateConfig":
        """The same comparison with each checkpoint as a contestant; baseline and reference are of `seed`, 0 on."""
        names = {name: self.names_of(name) for name in self.contestants}
        models: dict[str, str | list[str]] = {}
        best_of = {}
        for name, sources in self.models.items():
            models |= zip(names[name], [sources] if isinstance(sources, str) else sources, strict=True)
        for name, chooser in self.best_of.items():
            for seed_name, policy in zip(names[name], names[chooser.policy], strict=True):
                best_of[seed_name] = replace(chooser, policy=policy)
        chosen = {name: of_seeds[seed % len(of_seeds)] for name, of_seeds in names.items()}
        reference = chosen.get(str(self.reference))
        return replace(self, models=models, best_of=best_of, baseline=chosen[self.baseline], reference=reference)

    def checkpoint(self, name: str) -> str:
        """Directory or Hub name of a single model of `models`."""
        return str(self.models[name])

    @property
    def measured_from(self) -> str | None:
        """The name of the model that KL and log-probabilities are measured from; None: there is none."""
        return self.baseline if self.reference is None and self.baseline in self.models else self.reference

    def policy_of(self, name: str) -> str | None:
        """Directory or Hub name of the model whose responses a contestant gives; None where none of ours does."""
        source = self.sources_of(name)
        return None if source is None else str(source)

    def sources_of(self, name: str) -> str | list[str] | None:
        """The model, or the list of them, whose responses a contestant gives; None where none of ours does."""
        return self.models.get(self.best_of[name].policy if name in self.best_of else name)
