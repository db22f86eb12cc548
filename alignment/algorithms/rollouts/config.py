"""Settings of every stage that samples its own responses and learns from them."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

from alignment.adapters.specs import AdapterSpec, LoRASpec
from alignment.algorithms.dpo.config import PolicyOptim
from alignment.data.config import DataConfig
from alignment.generation import SamplingConfig
from alignment.generation.requests import NewTokens
from alignment.models.weights_config import WeightsConfig
from alignment.rewards.specs import RewardSpec, url_problem
from alignment.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    Settings,
    Share,
)
from alignment.training import TrainingConfig

METRICS = {"hotel_gold": "alignment.hotel_world.gold:gold_score"}  # name in the config -> module:function


@dataclass(frozen=True, kw_only=True)
class ServersConfig(Settings):
    """vLLM servers that sample in place of this process; how they are started is said in servers.py.

    Attributes:
        urls: of the servers, such as http://10.0.0.2:8000; rank r asks the one of number r, modulo theirs.
        weights_folder: of the policy's weights, which this process and the servers see under the same path.
        key_variable: environment variable that holds the servers' key; None: they want none.
        timeout_seconds: for one request: a response, or the loading of the weights.
        retries: further requests after a failed one.
        requests: responses that are drawn at the same time for one rank.
    """

    urls: list[str]
    weights_folder: str
    key_variable: str | None = None
    timeout_seconds: PositiveFloat = 600.0
    retries: NonNegativeInt = 2
    requests: PositiveInt = 64

    RULES = (
        Rule("urls", lambda c: not c.urls, "must name at least one server"),
        Rule("urls", lambda c: next(filter(None, map(url_problem, c.urls)), ""), "{found}"),
    )


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(Settings):
    """Settings of a stage that learns from its own samples.

    Attributes:
        policy: the checkpoint to start from, usually the SFT policy.
        data: prompts.
        output: the run's directory.
        reward_model: directory of the reward model: the short form of `rewards` with this one entry.
        rewards: what a response is rewarded for, as a list of entries of one kind each; its score is the sum of
            weight * clip(normalize(part)), and each part is logged as `score/NAME`. Nothing is learned from a response
            without a score: no reward gave a number, or a judge failed on it. Their share is `unscored_share`.
        reference: checkpoint of the reference; None: the starting checkpoint itself, also after a resume.
        adapter: train adapters, without dropout; the reference is then the policy with its adapter off.
        chat_template: a built-in one's name (chatml, llama3, ...) or a Jinja file, also saved with the model; None: the
            tokenizer's own.
        weights: type of the frozen weights in memory, the reference's and the reward model's among them. Networks that
            are adapters of one base hold its weights once, where FSDP2 or ZeRO do not shard each network by itself.
        missing_end_penalty: taken off the score of a response that did not end, in deviations of the scores: 1 is 1
            where a reward model's scores are normalized, else the deviation of the iteration's scores over all
            responses. Equal scores have none, and nothing is taken off them.
        max_new_tokens: longest response, end token included.
        responses_per_prompt: responses sampled to each prompt; `training.batch_size` counts prompts.
        temperature: of the samples.
        top_k, top_p, min_p: filters of the samples, in this order: the k likeliest tokens (0: all), the smallest set of
            likeliest tokens whose probability reaches top_p (1: all), tokens at least min_p times as likely as the
            likeliest (0: all). What the sampler logs is the log-probability in the cut distribution; what learns from
            the samples takes that of the whole one, and the KL from the reference is summed over the whole vocabulary,
            which takes one more forward of policy and reference.
        micro_rollout_batch_size: responses that one process samples side by side. Each holds its keys and values for
            the longest prompt and `max_new_tokens`; the number changes memory and speed, and no response.
        rollout_weights: of the policy while it samples, where FSDP2 or ZeRO-3 shards it. gathered: whole on every
            device, gathered once per iteration. sharded: each block is gathered for every token, which is slower and
            takes the memory of one block. auto: gathered where it fits; the choice is printed. It changes no response.
        cuda_graphs: start all kernels of a decoding step by one call, on a GPU with whole weights. It changes no
            response.
        servers: vLLM servers that sample; None: this process does. Their log-probabilities are rounded otherwise, which
            `importance_cap` corrects like samples of earlier weights, and with `rollouts_behind` they sample while this
            process learns.
        epochs: passes over the samples of each iteration.
        minibatches: updates in each pass.
        metrics: functions of prompts and responses to log the mean of, which nothing learns from: a name of METRICS, or
            module:function. A mean is logged under its function's name.
    """

    policy: str = field(kw_only=False)
    data: DataConfig = field(kw_only=False)
    output: str = field(kw_only=False)
    reward_model: str | None = None
    rewards: list[RewardSpec] = field(default_factory=list)
    reference: str | None = None
    adapter: AdapterSpec | None = None
    chat_template: str | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    optim: PolicyOptim = field(default_factory=PolicyOptim)
    missing_end_penalty: NonNegativeFloat = 1.0
    responses_per_prompt: PositiveInt = 1
    max_new_tokens: NewTokens = 64
    temperature: PositiveFloat = 1.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    min_p: Share = 0.0
    micro_rollout_batch_size: PositiveInt = 256
    rollout_weights: Literal["auto", "gathered", "sharded"] = "auto"
    cuda_graphs: bool = False
    servers: ServersConfig | None = None
    epochs: PositiveInt = 1
    minibatches: PositiveInt = 1
    metrics: list[str] = field(default_factory=list)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    RULES = (
        Rule(
            "cuda_graphs",
            lambda c: c.cuda_graphs and (c.servers is not None or c.rollout_weights == "sharded"),
            "captures steps of this process with whole weights; leave it out with servers and rollout_weights=sharded",
        ),
        Rule(
            "servers",
            lambda c: (
                c.servers is not None
                and c.adapter is not None
                and (not isinstance(c.adapter, LoRASpec) or c.adapter.token_rows or c.adapter.modules_to_save)
            ),
            "read the weights of whole models and of LoRA alone; take adapter.kind=lora without token_rows and "
            "modules_to_save, or leave adapter or servers out",
        ),
        Rule(
            "minibatches",
            lambda c: c.minibatches > c.training.batch_size,
            "({self.minibatches}) cannot exceed training.batch_size ({self.training.batch_size})",
        ),
        Rule(
            "metrics",
            lambda c: [name for name in c.metrics if name not in METRICS and ":" not in name],
            "{found} are unknown; known: " + ", ".join(METRICS) + ", or module:function",
        ),
        Rule(
            "training.ema_decay",
            lambda c: c.training.ema_decay is not None,
            "has no effect on a policy that learns from its own samples; leave it out",
        ),
    )

    @property
    def sampler_differs(self) -> bool:
        """True where filters draw responses from another distribution than the policy's with its present weights."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def samples_differ(self) -> bool:
        """True where sampling is off-policy by configuration: filters, or samples of earlier weights."""
        return self.sampler_differs

    @property
    def sampling(self) -> SamplingConfig:
        """The settings of the sampler; a checkpoint's generation config has no effect."""
        return SamplingConfig(
            self.max_new_tokens, self.temperature, self.top_k, self.top_p, self.training.seed, min_p=self.min_p
        )
