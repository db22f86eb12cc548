"""Rollouts: sampled responses with log-probabilities, values and scores."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor

from alignment.algorithms.policies import Reference
from alignment.algorithms.rollouts.config import SamplingSettings
from alignment.algorithms.rollouts.state import SampledResponses, SamplingState
from alignment.data.batches import Example
from alignment.generation import Generation, SamplingConfig, decode_responses
from alignment.losses.language import CHUNK_ELEMENTS, kl_divergence
from alignment.models.model import Model
from alignment.ragged import Ragged, Sharing, allowed, fill_groups, group_by_length
from alignment.rewards.combine import as_scores
from alignment.training.speed import PhaseClock

Group = TypeVar("Group")


@dataclass(frozen=True)
class Baseline:
    """Scores of the greedy response to each row's prompt and whether it ended by itself, as in `Rollout`, [B] each."""

    scores: Tensor
    ended: Tensor
    shaped_scores: Tensor | None = None


@dataclass(frozen=True)
class Rollout:
    """B sampled responses of at most R tokens; tensors per token are [B, R], zero where `mask` is False.

    Attributes:
        prompts, responses: token ids.
        rows: the prompt of each response as it was read.
        numbers: global number of each row over the whole run; fixes its draws. Responses to one prompt are adjacent
            rows of one rank.
        mask: True at each response token.
        log_probs: of the policy before its updates, per token, as training computes them; the ratio's denominator.
            Where no ratio is learned from (online DPO) those of `sampled_log_probs`.
        sampled_log_probs: of the distribution that each token was drawn from, as the sampler computed them.
        reference_log_probs: of the reference, same tokens and temperature; None where nobody asked it.
        token_kl: exact KL of each token, see `exact_token_kl`, where the samples are not the policy's own; else None.
        values: the value model's estimate before each token; None without a value model.
        scores: of whole responses, neither normalized nor clipped, [B]; of several rewards the sum of weight * part.
            Not a number: the response has no score.
        ended: True where the response stopped by itself, [B].
        seconds: time it took to collect.
        phases: seconds of its parts: sampling, forward (log-probabilities and values), scoring.
        share_prompts: True where a prompt with several responses is computed once for all of them.
        weights: importance weights of the tokens, factors of their policy loss, where the sampler's distribution
            differs from the policy's; None: all are 1.
        baseline: of the greedy responses, with advantages=remax.
        score_parts: number of each reward by its name, not weighed, [B]; not a number where it does not apply. Empty
            with a single reward model.
        shaped_scores: of several rewards, each normalized, clipped and weighed, [B]; None: `scores`, to be normalized.
        score_deviation: deviation of `shaped_scores`, or of `scores` without them, over all ranks: the unit of
            `missing_end_penalty` where no normalization follows.
        rewards, advantages, returns: filled in by `add_advantages`.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    numbers: list[int]
    mask: Tensor
    log_probs: Tensor
    sampled_log_probs: Tensor
    reference_log_probs: Tensor | None
    values: Tensor | None
    scores: Tensor
    ended: Tensor
    seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    share_prompts: Sharing = False
    weights: Tensor | None = None
    token_kl: Tensor | None = None
    baseline: Baseline | None = None
    score_parts: dict[str, Tensor] = field(default_factory=dict)
    shaped_scores: Tensor | None = None
    score_deviation: float = 1.0
    rows: Sequence[Example] = ()
    rewards: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None

    @property
    def learned(self) -> Tensor:
        """True where the response has a score, and with advantages=remax a baseline: what is learned from, [B]."""
        scored = ~self.scores.isnan()
        return scored if self.baseline is None else scored & ~self.baseline.scores.isnan()

    @property
    def learned_mask(self) -> Tensor:
        """True at each token of a response that is learned from, [B, R]."""
        return self.mask & self.learned.unsqueeze(1)


# Sampling


def collect(state: SamplingState, config: SamplingSettings, prompts: Sequence[Example], step: int) -> Rollout:
    """Sample a response to each of this rank's prompts, and ask every network about it.

    With `rollouts_behind` the responses are those that were sampled in the iteration before, and those of the next one
    are sampled now, before the updates of this one.

    Args:
        prompts: of all ranks.
        step: number of the iteration, from 0.

    Returns:
        A rollout without rewards or advantages.
    """
    began = time.perf_counter()
    if state.ahead is None:
        samples = draw_samples(state, config, prompts, step)
    else:
        samples = state.ahead.waiting or draw_samples(state, config, prompts, step)
        following = state.ahead.prompts_of(step + 1)
        state.ahead.waiting = draw_samples(state, config, following, step + 1) if following else None
    sampling = time.perf_counter() - began
    rollout = ask_networks(state, config, samples)
    phases = {"sampling": sampling, **rollout.phases}
    return replace(rollout, seconds=time.perf_counter() - began, phases=phases)


def draw_samples(
    state: SamplingState, config: SamplingSettings, prompts: Sequence[Example], step: int
) -> SampledResponses:
    """Responses to each of this rank's prompts, `responses_per_prompt` side by side."""
    group = state.process_group
    count = config.responses_per_prompt
    indices = range(group.rank, len(prompts), group.size)
    rows = [prompts[i] for i in indices for _ in range(count)]
    numbers = [(step * config.training.batch_size + i) * count + k for i in indices for k in range(count)]
    ids = [list(row.ids) for row in rows]
    with torch.no_grad():
        if state.servers is None:
            drawn = sample(state, config.sampling, ids, numbers, config.micro_rollout_batch_size)
        else:
            state.servers.update()
            drawn = state.servers.start(ids, config.sampling, numbers, state.stop_ids)
    return SampledResponses(rows, numbers, drawn)


def sample(
    state: SamplingState,
    sampling: SamplingConfig,
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
    batch_size: int,
) -> Generation:
    """Responses to this rank's prompts, with the policy's weights whole on each rank or sharded, as the run chose."""
    backend = state.policy.backend
    group = state.process_group
    if state.servers is not None:
        state.servers.update()
        return state.servers.start(prompts, sampling, numbers, state.stop_ids).result()
    sampler = cast(Model, backend.unwrapped)
    # With whole weights no rank waits for another one, however unequal their work is.
    sharded = state.rollout_weights == "sharded"
    with backend.sharded_decoding() if sharded else backend.full_parameters():
        return decode_responses(
            sampler,
            prompts,
            sampling,
            state.stop_ids,
            rows=numbers,
            batch_size=batch_size,
            largest=group.largest if sharded else None,
            cuda_graphs=state.cuda_graphs and not sharded,
            vocabulary=sampler.known_tokens,
        )


# The networks' numbers


def ask_networks(state: SamplingState, config: SamplingSettings, samples: SampledResponses) -> Rollout:
    """A rollout of samples, with what the networks say of them now.

    The log-probabilities kept are those of the policy as training calls it: with and without a cache the same sum is
    rounded differently, and the first ratio must be 1.
    """
    device = state.process_group.device
    responses = samples.responses
    reference = state.reference
    clock = PhaseClock(device)
    kl = None
    with torch.no_grad(), state.policy.backend.autocast():
        mask = response_mask(responses.token_ids, device)
        with clock("forward"):
            numbers = ask_in_batches(partial(state.ask, config=config), state, config, samples, mask)
            if reference is not None and config.samples_differ:
                kl = exact_token_kl(state, reference, config, samples, mask)
        with clock("scoring"):
            scores = as_scores(state.score(samples.prompts, responses.token_ids, responses.ended))
    flat = torch.tensor([value for row in responses.log_probs for value in row], device=device)
    sampled = to_rectangle(flat, mask)
    return Rollout(
        prompts=[list(prompt.ids) for prompt in samples.prompts],
        responses=responses.token_ids,
        rows=samples.prompts,
        numbers=samples.numbers,
        mask=mask,
        log_probs=numbers.get("log_probs", sampled),
        sampled_log_probs=sampled,
        reference_log_probs=numbers.get("reference_log_probs"),
        token_kl=kl,
        values=numbers.get("values"),
        scores=scores.total.to(device),
        score_parts={name: part.to(device) for name, part in scores.parts.items()},
        shaped_scores=None if scores.shaped is None else scores.shaped.to(device),
        score_deviation=scores.std(state.process_group.sum),
        ended=torch.tensor(responses.ended, device=device),
        phases=clock.seconds,
        share_prompts=state.share_prompts,
    )


def ask_in_batches(
    ask: Callable[[Ragged], dict[str, Tensor]],
    state: SamplingState,
    config: SamplingSettings,
    samples: SampledResponses,
    mask: Tensor,
    *,
    limit: float = math.inf,
) -> dict[str, Tensor]:
    """The numbers that `ask` gives for each response token, asked for a few rows at a time, [B, R]."""
    limit = int(min(limit, config.training.tokens_per_forward))
    prompts = [list(prompt.ids) for prompt in samples.prompts]
    responses = samples.responses.token_ids
    rectangles: dict[str, Tensor] = {}
    groups = ragged_groups(prompts, responses, samples.numbers, limit, state.share_prompts)
    for rows, batch in equally_many(groups, state):
        index = torch.tensor(rows, device=mask.device)
        for name, values in ask(batch.to(mask.device)).items():
            rectangle = rectangles.setdefault(name, torch.zeros(mask.shape, device=mask.device))
            rectangle[index] = to_rectangle(values.float(), mask[index])
    return rectangles


def exact_token_kl(
    state: SamplingState, reference: Reference, config: SamplingSettings, samples: SampledResponses, mask: Tensor
) -> Tensor:
    """KL(policy || reference) of the distribution that each response token has in both, nats, [B, R].

    kl_t = sum_v p(v | s_t) (log p(v | s_t) - log p_ref(v | s_t)),  s_t the prompt and the tokens before t

    p is the whole distribution of the policy now, at the temperature of the samples, whatever the tokens were drawn
    from. log p - log p_ref of a drawn token estimates this sum only where p has drawn it: filtered samples leave the
    tail out, and the mean may then be negative. The prefixes s_t are those of the samples. Over the policy's own, the
    sum over a response has the mean KL(policy || reference) of responses; over others' it is that of continuing their
    prefixes.

    It takes a forward of policy and reference with the logits of few rows in memory.
    """
    vocabulary = cast(Model, state.policy.backend.unwrapped).spec.vocabulary
    chunk = max(1, CHUNK_ELEMENTS.get(mask.device.type, 2**25) // vocabulary)

    def ask(batch: Ragged) -> dict[str, Tensor]:
        logits = state.policy.model(batch=batch, return_logits=True).logits
        others = reference(batch=batch, return_logits=True).logits
        pairs = zip(logits.split(chunk), others.split(chunk), strict=True)
        return {
            "kl": torch.cat([kl_divergence(*(part.float() / config.temperature for part in pair)) for pair in pairs])
        }

    return ask_in_batches(ask, state, config, samples, mask, limit=chunk)["kl"]


# Batches


def ragged_of(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    numbers: Sequence[int],
    share_prompts: Sharing = False,
) -> Ragged:
    """Prompt + response of each row; every response token is a target. Equal prompts may be shared."""
    pairs = list(zip(prompts, responses, strict=True))
    return Ragged.build_shared(
        [[*prompt, *response] for prompt, response in pairs],
        [[False] * len(prompt) + [True] * len(response) for prompt, response in pairs],
        equal_prompts(prompts),
        row_ids=[f"rollout {row_number}" for row_number in numbers],
        share=share_prompts,
    )


def equal_prompts(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Numbers of the rows that have each prompt, in the order in which the prompts come first."""
    rows: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows.setdefault(tuple(prompt), []).append(row)
    return list(rows.values())


def group_rollouts(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], limit: int, share_prompts: Sharing
) -> list[list[int]]:
    """Row numbers in groups of similar length, each of at most `limit` tokens; a longer row is a group of its own.

    Responses that share their prompt stay together as far as the limit allows, and their prompt counts once.
    """
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    together = [rows for rows in equal_prompts(prompts) if allowed(share_prompts, [lengths[row] for row in rows])]
    if not together:
        return group_by_length(lengths, limit)
    alone = set(range(len(prompts))).difference(*together)
    units = [[row] for row in alone]
    sizes = [lengths[row] for row in alone]
    for rows in together:
        before = len(prompts[rows[0]])
        for part in fill_groups(range(len(rows)), [lengths[row] - before for row in rows], max(1, limit - before)):
            units.append([rows[i] for i in part])
            sizes.append(before + sum(lengths[row] - before for row in units[-1]))
    order = sorted(range(len(units)), key=lambda unit: max(lengths[row] for row in units[unit]))
    return [[row for unit in group for row in units[unit]] for group in fill_groups(order, sizes, limit)]


def ragged_groups(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    numbers: Sequence[int],
    limit: int,
    share_prompts: Sharing,
) -> list[tuple[list[int], Ragged]]:
    """Row numbers and tokens of the groups of `group_rollouts`."""
    groups = []
    for rows in group_rollouts(prompts, responses, limit, share_prompts):
        row_prompts = [prompts[row] for row in rows]
        row_responses = [responses[row] for row in rows]
        row_numbers = [numbers[row] for row in rows]
        groups.append((rows, ragged_of(row_prompts, row_responses, row_numbers, share_prompts)))
    return groups


def equally_many(groups: list[Group], state: SamplingState) -> list[Group]:
    """The groups of rows; where forwards are collective, the last one again until every rank has equally many."""
    if not state.policy.backend.collective_forward:
        return groups
    return [*groups, *[groups[-1]] * (state.process_group.largest(len(groups)) - len(groups))]


def response_mask(responses: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """True at each token of B responses of at most R tokens, [B, R]."""
    lengths = torch.tensor([len(tokens) for tokens in responses], device=device)
    return torch.arange(int(lengths.max()), device=device) < lengths[:, None]


def to_rectangle(flat: Tensor, mask: Tensor) -> Tensor:
    """Values at the True positions of `mask`, row by row [M], as a tensor [B, R] with zeros elsewhere."""
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, flat)
