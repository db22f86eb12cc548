"""A world small enough to know the answer: 216 responses of three tokens, policies and critics that are tables."""

import itertools
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from alignment.algorithms.policies import Policy
from alignment.algorithms.ppo import FixedKL, PPOConfig, iterate
from alignment.algorithms.ppo.state import PPOState, ScoreNormalizer
from alignment.data.config import DataConfig
from alignment.generation import Generation
from alignment.losses import token_log_probs_and_entropy
from alignment.models.outputs import LanguageOutput, LogitsOutput, ValueOutput
from alignment.ragged import Ragged
from alignment.training import Engine, OptimConfig, TrainingConfig
from tests.examples import prompt_example

VOCABULARY, LENGTH = 6, 3
SEQUENCES = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))  # [216, 3]
STATES = 1 + VOCABULARY + VOCABULARY**2  # the empty response, those of one token, those of two


# the state before each token of each response, [216, 3]
STATES_BEFORE = torch.stack(
    [
        torch.zeros(len(SEQUENCES), dtype=torch.long),
        1 + SEQUENCES[:, 0],
        1 + VOCABULARY + VOCABULARY * SEQUENCES[:, 0] + SEQUENCES[:, 1],
    ],
    dim=1,
)


def states_of(batch: Ragged) -> Tensor:
    """Number of the state after each token of prompt + response, [rows, 4]; after the last one there is none (0)."""
    first, second = batch.tokens.view(-1, 1 + LENGTH)[:, 1:3].unbind(1)
    zero = torch.zeros_like(first)
    return torch.stack([zero, 1 + first, 1 + VOCABULARY + VOCABULARY * first + second, zero], dim=1)


class TablePolicy(nn.Module):
    """A language model whose logits are a table with one row per state; the value head is a column beside it."""

    spec = SimpleNamespace(vocabulary=VOCABULARY)

    def __init__(self, logits: Tensor, *, reads_temperature: bool = True):
        super().__init__()
        self.reads_temperature = reads_temperature
        self.logits, self.value_head = nn.Parameter(logits.clone()), nn.Parameter(torch.zeros(STATES))

    def forward(
        self, *, batch: Ragged, temperature: float = 1.0, entropy: bool = False, values: bool = False,
        return_logits: bool = False,
    ) -> LanguageOutput | LogitsOutput:  # fmt: skip
        states = states_of(batch)[:, :-1].reshape(-1)
        if return_logits:
            return LogitsOutput(self.logits[states])
        tokens = batch.tokens[batch.target_index]
        divisor = temperature if self.reads_temperature else 1.0
        log_probs, entropies = token_log_probs_and_entropy(self.logits[states] / divisor, tokens)
        return LanguageOutput(log_probs, entropies, values=self.value_head[states] if values else None)

    def log_distribution(self, temperature: float = 1.0) -> Tensor:
        """Log-probability of each token of each of the 216 responses, [216, 3]; their sums are those of the responses."""
        table = (self.logits / temperature).log_softmax(1)
        return torch.stack([table[STATES_BEFORE[:, t], SEQUENCES[:, t]] for t in range(LENGTH)], dim=1)


class TableCritic(nn.Module):
    """A value model that is a table of the states."""

    def __init__(self, values: Tensor):
        super().__init__()
        self.values = nn.Parameter(values.clone())

    def forward(self, *, batch: Ragged, tokens: Tensor) -> ValueOutput:
        return ValueOutput(self.values[states_of(batch).reshape(-1)[tokens]])


def number_of(response) -> int:
    first, second, third = response
    return (VOCABULARY * first + second) * VOCABULARY + third


class World:
    """A reference and a reward of each response, drawn at random, and what a policy should come to.

    Attributes:
        reference: the reference's table, [states, 6].
        reward: of each response, in [0, 1], [216].
    """

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.seed = seed
        self.reference = 0.5 * torch.randn(STATES, VOCABULARY, generator=generator)
        self.reward = torch.rand(len(SEQUENCES), generator=generator)

    def optimum(self, beta: float, temperature: float = 1.0) -> Tensor:
        """reference * exp(reward / beta) / Z, of the reference at the temperature, [216]."""
        reference = TablePolicy(self.reference).log_distribution(temperature).sum(1).detach()
        return (reference + self.reward / beta).softmax(0)

    def optimum_of_token_penalties(self, beta: float) -> Tensor:
        """Where the reverse KL of each token alone is penalized (k2 in the loss), [216].

        At a state, p(a) is proportional to reference(a) * exp(Q(a) / beta), Q(a) the mean reward after a under p itself:
        no token answers for the penalties of later ones.
        """
        table = self.reference.log_softmax(1)
        of_responses, after = [], self.reward.view(VOCABULARY, VOCABULARY, VOCABULARY)
        for first, last in ((1 + VOCABULARY, STATES), (1, 1 + VOCABULARY), (0, 1)):
            p = (table[first:last].view(after.shape) + after / beta).softmax(-1)
            of_responses.append(p)
            after = (p * after).sum(-1)
        third, second, first = of_responses
        return (first[:, None, None] * second[..., None] * third).reshape(-1)

    def distance(self, policy: TablePolicy, target: Tensor, temperature: float = 1.0) -> float:
        """Total variation between the policy and a target distribution."""
        return (policy.log_distribution(temperature).sum(1).exp() - target).abs().sum().item() / 2


def table_sampler(generator: torch.Generator, sampler_temperature: float | None = None):
    """In place of decoding: independent rows of the table policy's exact distribution, or its likeliest responses.

    Args:
        sampler_temperature: of a sampler that is not the policy; None: that of the settings.
    """

    @torch.no_grad()
    def sample(state, sampling, prompts, numbers, batch_size) -> Generation:
        per_token = state.policy.backend.unwrapped.log_distribution(sampler_temperature or sampling.temperature or 1.0)
        if sampling.temperature == 0:
            first = state.policy.backend.unwrapped.logits.argmax(1)
            second = first[1 + first[0]]
            third = first[1 + VOCABULARY + VOCABULARY * first[0] + second]
            rows = number_of((first[0], second, third)).expand(len(prompts))
        else:  # one draw in each of as many equal slices of the distribution: each row's is exact, their sum varies less
            slices = (torch.arange(len(prompts)) + torch.rand(len(prompts), generator=generator)) / len(prompts)
            rows = torch.searchsorted(per_token.sum(1).exp().cumsum(0), slices).clamp(max=len(SEQUENCES) - 1)
            rows = rows[torch.randperm(len(prompts), generator=generator)]
        return Generation([], SEQUENCES[rows].tolist(), per_token[rows].tolist(), [False] * len(prompts))

    return sample


def train(world: World, beta: float, settings: dict, faults: dict) -> TablePolicy:
    """PPO or another method on the world, through `iterate`.

    Args:
        settings: of the config; `iterations`, `rows` and `rate` say how long.
        faults: reward_sign, kl_sign, and reads_temperature of the networks in training; by default none.
    """
    settings = dict(settings)
    iterations, rows, rate = settings.pop("iterations"), settings.pop("rows"), settings.pop("rate")
    count = settings.get("responses_per_prompt", 1)
    training = TrainingConfig(batch_size=rows // count, max_steps=iterations, seed=world.seed, micro_batch_tokens=10**6)
    config = PPOConfig(
        policy="", reward_model="-", data=DataConfig(train="none.jsonl"), output="", max_new_tokens=LENGTH,
        kl_coef=beta, missing_end_penalty=0.0, normalize_scores=False, training=training, value_clip_range=1e3,
        **{"epochs": 1, "whiten_advantages": False, **settings},
    )  # fmt: skip
    optim = OptimConfig(learning_rate=rate, schedule="cosine", eps=1e-4, max_grad_norm=0)
    reads = faults.get("reads_temperature", True)
    start, reference = (TablePolicy(world.reference, reads_temperature=reads) for _ in range(2))
    updates = iterations * config.epochs * config.minibatches
    if not config.shares_trunk:
        start.value_head.requires_grad_(False)
    values = torch.zeros(STATES)
    if config.value_model == "reward_model":  # a critic that already says something: the mean reward after the state
        values = world.reward.new_zeros(STATES).index_put((STATES_BEFORE[:, 0],), world.reward, accumulate=True) / 216
    state = PPOState(
        policy=Engine(start, optim, training, total_steps=updates),
        value=Engine(TableCritic(values), OptimConfig(learning_rate=rate, schedule="constant", max_grad_norm=0), training,
                     total_steps=updates) if config.has_value_model and not config.shares_trunk else None,
        reference=torch.no_grad()(reference),
        score=lambda prompts, responses, ended: faults.get("reward_sign", 1.0)
        * world.reward[[number_of(response) for response in responses]],
        stop_ids=[],
        kl=FixedKL(beta * faults.get("kl_sign", 1.0)),
        normalizer=ScoreNormalizer(enabled=False),
        start=Policy(start, None),
        shared_value=config.shares_trunk,
    )  # fmt: skip
    prompts = [prompt_example([0], "", {}, str(i)) for i in range(training.batch_size)]
    for step in range(iterations):
        iterate(state, config, prompts, step)
    return start
