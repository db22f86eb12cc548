"""Settings of judges, the same for win rates, tournaments and judges that are held against people, and judges made of them."""

from dataclasses import dataclass, field
from typing import Literal

from alignment.evaluation.judge_templates import TEMPLATES, is_rubric
from alignment.models.weights_config import WeightsConfig
from alignment.rewards.specs import ServiceSpec
from alignment.settings import NonNegativeFloat, PositiveInt, Rule, Settings, Share

JUDGES = Literal["gold", "reward_model", "model", "endpoint", "longer", "verdicts"]


@dataclass(frozen=True, kw_only=True)
class EndpointConfig(ServiceSpec):
    """A chat model behind OpenAI's protocol, as a judge or as a contestant.

    Attributes:
        url: of `.../v1/chat/completions`.
        model: its name there.
        max_tokens: longest answer of a judge; a contestant's is max_new_tokens.
        reasons: a judge writes its reasons before its answer; raise max_tokens for it.
        logprobs: a judge's verdict is read from the log-probabilities of the first token and not from the text, where the
            service gives them (20 top_logprobs).
        parameters: further parameters of the request; null leaves one of ours out.
        input_price, output_price: of a million tokens, in any currency, to foretell and sum up the cost; None: not told.
    """

    model: str
    max_tokens: PositiveInt = 16
    reasons: bool = False
    logprobs: bool = False
    parameters: dict[str, bool | int | float | str | None] = field(default_factory=dict)
    input_price: NonNegativeFloat | None = None
    output_price: NonNegativeFloat | None = None

    RULES = (
        Rule("logprobs", lambda c: c.logprobs and c.reasons, "reads the first token, where reasons would begin; take one"),
        Rule("input_price", lambda c: (c.input_price is None) != (c.output_price is None),
             "and output_price must be given together"),
    )  # fmt: skip

    def cost(self, input_tokens: int, output_tokens: int) -> float | None:
        """The price of so many tokens; None where no prices are given."""
        if self.input_price is None or self.output_price is None:
            return None
        return (self.input_price * input_tokens + self.output_price * output_tokens) / 1e6


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(Settings):
    """Who judges, and how: a base class of every config that has a judge.

    Attributes:
        judge: required. reward_model (given as `reward_model` or several as `reward_models`), model (a language model by
            the log-probabilities of its answers, given as `judge_model`), endpoint (a chat model behind a URL), verdicts
            (a file filled in by people or another program), longer (the longer response: a baseline for judges), gold (the
            true reward of the hotel data set, for its prompts only).
        reward_model: directory of the judging reward model; with another judge it gives each model's mean proxy score.
        reward_models: directories of several, for judge=reward_model: the verdict is that of most of them, and the win
            rate by each is told beside it.
        judge_model: directory or Hub name of the judging language model; its own chat template is used where it has one.
        endpoint: the service of judge=endpoint.
        verdicts: file of verdicts for judge=verdicts; if it does not exist, it is written as a form to fill in. The
            next start reads the responses that were shown, whatever its seed and weights.
        judge_template: of the question to a language model: pairwise, summary (two responses, one letter), rubric,
            summary_rubric (one response, 1 to 7; the higher rating wins), or a file with {prompt}, {first} and {second},
            or with {prompt} and {response}.
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
        Rule("judge", lambda c: c.judge is None,
             "is missing; say who judges: judge=reward_model with reward_model=DIR (one that no policy was trained against), "
             "judge=model with judge_model=DIR (a language model), judge=endpoint with endpoint.url and endpoint.model, "
             "judge=verdicts with verdicts=FILE (filled in by people), or judge=longer (the longer response wins); "
             "judge=gold is for prompts of the generated hotel world alone"),
        Rule("reward_model", lambda c: c.judge == "reward_model" and c.reward_model is None and not c.reward_models,
             "must be a directory, the judge's"),
        Rule("reward_models", lambda c: c.reward_models and (c.judge != "reward_model" or len(set(c.reward_models)) < 2),
             "are two or more different directories, for judge=reward_model"),
        Rule("judge_model", lambda c: c.judge == "model" and c.judge_model is None, "must be a directory, the judge's"),
        Rule("endpoint", lambda c: c.judge == "endpoint" and c.endpoint is None, "must be a section with url and model"),
        Rule("verdicts", lambda c: c.judge == "verdicts" and c.verdicts is None, "must be a file, of the verdicts"),
        Rule("judge_template", lambda c: c.ties and is_rubric(TEMPLATES.get(c.judge_template, "")),
             "{self.judge_template} rates one response, and has no ties of its own; leave ties out"),
    )  # fmt: skip

    @property
    def judging_models(self) -> tuple[str, ...]:
        """Directories of the reward models that judge."""
        return self.reward_models or ((self.reward_model,) if self.reward_model is not None else ())

    @property
    def scoring_models(self) -> list[str]:
        """Directories of all reward models that score: the judges, and the one of the mean proxy score."""
        return list(dict.fromkeys([*self.reward_models, *filter(None, [self.reward_model])]))
