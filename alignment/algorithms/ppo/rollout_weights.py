"""Whether the policy's weights are gathered whole for sampling, or stay sharded: what fits decides, alike on all ranks."""

import os
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from alignment.algorithms.ppo.config import SamplingSettings
from alignment.algorithms.ppo.setup import SamplingState
from alignment.data.examples import PromptExample
from alignment.data.table import lengths_of
from alignment.errors import UserError
from alignment.models.external.models import ExternalModel
from alignment.models.native_model import NativeModel
from alignment.training import Run
from alignment.training.distributed import ProcessGroup

USABLE = 0.9  # share of the free memory that is planned with; the allocator loses the rest between blocks of odd sizes


def choose_rollout_weights(
    config: SamplingSettings,
    prompts: Sequence[PromptExample],
    state: SamplingState,
    run: Run,
    *,
    responses_per_prompt: int = 1,
) -> Literal["gathered", "sharded"]:
    """`config.rollout_weights`, with `auto` decided by the free memory; noted in the run. A collective operation.

    Gathered weights stand beside the cache and logits of the samples and the optimizer's state, which the first update
    creates. Every rank must have room for them: the one with the least free memory decides.

    Raises:
        UserError: `gathered` was asked for and does not fit.
    """
    backend, group = state.policy.backend, state.process_group
    whole = backend.whole_bytes()
    if whole == 0:
        if config.rollout_weights == "sharded":
            run.note(
                f"rollout_weights: sharded has no effect, because {group.kind} keeps the policy whole on each process"
            )
        return "gathered"
    trained = sum(trainable_elements(engine.backend.unwrapped) for engine in state.engines)
    moments = 2 * 4 * trained // group.size  # of AdamW, sharded as the weights are
    other = group.largest(sampling_bytes(config, prompts, state, responses_per_prompt) + moments)
    free = -group.largest(-free_bytes(group))
    other = group.largest(other)
    fits = whole + other <= USABLE * free
    figures = (
        f"the whole policy takes {_gigabytes(whole)} on each device, cache, logits and optimizer state "
        f"{_gigabytes(other)}, and {_gigabytes(free)} are free"
    )
    if config.rollout_weights == "gathered" and whole > free:
        raise UserError(f"rollout_weights=gathered does not fit: {figures}; set it to sharded, or to auto")
    choice = config.rollout_weights
    if choice == "auto":
        choice = "gathered" if fits else "sharded"
    run.note(f"rollout_weights: {choice} ({'as set' if choice == config.rollout_weights else 'auto'}): {figures}")
    return choice


def sampling_bytes(
    config: SamplingSettings, prompts: Sequence[PromptExample], state: SamplingState, responses_per_prompt: int = 1
) -> int:
    """Bytes of the cache and of the logits of one batch of samples on one device."""
    model, group = state.policy.backend.unwrapped, state.process_group
    assert isinstance(model, NativeModel | ExternalModel)
    rows = min(config.micro_rollout_batch_size, -(-config.training.batch_size * responses_per_prompt // group.size))
    tokens = int(lengths_of(prompts).max()) + config.max_new_tokens
    element = 2 if config.training.precision == "bf16" else 4
    logits = 3 * 4 * model.spec.vocabulary  # float32: the logits, their log-softmax and its cumulative sum
    return rows * (tokens * cached_numbers(model) * element + logits)


def cached_numbers(model: NativeModel | ExternalModel) -> int:
    """Numbers that the cache holds of one token, over all layers."""
    if isinstance(model, NativeModel):
        layers = [layer.attention for layer in model.spec.layers]
        return sum(2 * attention.key_value_heads * attention.head_dim for attention in layers)
    config = model.inner.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * head_dim


def trainable_elements(model: nn.Module) -> int:
    """Elements of the trainable weights over all ranks; ZeRO-3 keeps an empty tensor and the number in `ds_numel`."""
    return sum(
        getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters() if parameter.requires_grad
    )


def free_bytes(group: ProcessGroup) -> int:
    """Free memory of this process's device; processes that share one machine's memory get equal parts of it."""
    if group.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(group.device)
        return free + torch.cuda.memory_reserved(group.device) - torch.cuda.memory_allocated(group.device)
    import psutil

    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e7 else f"{count / 1e6:.3g} MB"
