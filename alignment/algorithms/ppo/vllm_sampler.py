"""Sampling by vLLM inside the training process, with the weights that the policy has at the time.

Written after the Python interface of vLLM 0.11 and later, and tested against a stand-in with the same signatures: nothing
here has run against vLLM itself. Each response has a random seed of its own, a function of (seed, row); vLLM rounds
differently from batch to batch, so that draws are fixed up to rounding only. It applies min-p before top-k and top-p; the
log-probabilities are those of the distribution that it drew from.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.cuda import is_available as gpu_is_available

from alignment.adapters.files import is_adapter
from alignment.adapters.specs import UNMERGEABLE, AdapterSpec
from alignment.algorithms.ppo.config import SamplingSettings
from alignment.errors import UserError, install_advice
from alignment.generation import Responses, SamplingConfig
from alignment.loading import find_base, find_directory
from alignment.models.external.models import ExternalModel
from alignment.models.huggingface.checkpoint import named_as_saved
from alignment.models.native_model import NativeModel
from alignment.models.weights_config import WeightsConfig
from alignment.training import Engine
from alignment.training.distributed import launched_size

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
T = TypeVar("T")


class Completion(Protocol):
    """A response of vLLM: tokens, the log-probability of each by its id, and `stop` or `length`."""

    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, "TokenLogProb"]]
    finish_reason: str | None


class TokenLogProb(Protocol):
    """The log-probability of a token."""

    logprob: float


class Completions(Protocol):
    """vLLM's responses to a prompt."""

    outputs: Sequence[Completion]


class LoadableModel(Protocol):
    """A model of vLLM, which takes weights under the names of a Hugging Face file and gives the names of those it set."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None: ...


class LLM(Protocol):
    """What is called of `vllm.LLM`."""

    def generate(
        self, prompts: list[dict[str, list[int]]], sampling_params: list[object], *, use_tqdm: bool
    ) -> Sequence[Completions]: ...

    def apply_model(self, func: Callable[[nn.Module], T]) -> list[T]: ...

    def reset_prefix_cache(self) -> bool | None: ...

    def sleep(self, level: int) -> None: ...

    def wake_up(self, tags: list[str]) -> None: ...


def require_vllm(config: SamplingSettings, source: str, adapter: AdapterSpec | None, weights: WeightsConfig) -> None:
    """Refuse, before any model is loaded, a run that asks for vLLM and cannot have it.

    Args:
        config: the stage's settings.
        source: checkpoint that the policy starts from.
        adapter, weights: of the policy.

    Raises:
        UserError: vLLM or a GPU is missing, the processes do not fit its tensor parallelism, or the policy's weights cannot
            be handed to it.
    """
    if config.sampler != "vllm":
        return
    try:
        import_module("vllm")
    except ImportError as error:
        raise UserError(
            f"sampler=vllm needs vLLM and a GPU ({error}): {install_advice('vllm')}, or set sampler=engine"
        ) from error
    if not gpu_is_available():
        raise UserError("sampler=vllm needs a GPU, and torch finds none; set sampler=engine")
    processes, parallel = launched_size(), config.vllm.tensor_parallel_size
    if processes % parallel:
        raise UserError(f"vllm.tensor_parallel_size {parallel} does not divide the number of processes, {processes}")
    if weights.quantize is not None:
        raise UserError(f"weights.quantize={weights.quantize}: sampler=vllm takes whole weights; set sampler=engine")
    from alignment.adapters.peft_files import read_spec

    directory = find_directory(source)
    for spec in (adapter, read_spec(directory) if is_adapter(directory) else None):
        if isinstance(spec, UNMERGEABLE):
            raise UserError(
                f"sampler=vllm takes whole weights, and a {spec.kind} adapter is no change of weights; set sampler=engine"
            )


def build_vllm_sampler(
    config: SamplingSettings, source: str, policy: Engine, stop_ids: Sequence[int], longest: int
) -> "VLLMSampler | None":
    """Start vLLM in every process; None with another sampler. A collective operation.

    Args:
        config: the stage's settings.
        source: checkpoint that the policy starts from.
        policy: the engine that trains it.
        stop_ids: tokens that end a response.
        longest: tokens of the longest prompt.

    Raises:
        UserError: an adapter changes one of two layers that share a weight.
    """
    if config.sampler != "vllm":
        return None
    refuse_untied(policy.backend.unwrapped)
    directory, settings, group = find_directory(source), config.vllm, policy.process_group
    # The model must live in this process, where its weights are handed over without pickling.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    module = import_module("vllm")
    llm = module.LLM(
        model=str(find_base(directory) if is_adapter(directory) else directory),
        skip_tokenizer_init=True,
        generation_config="vllm",  # not the checkpoint's
        dtype=DTYPES[config.training.precision],
        seed=config.training.seed,
        max_model_len=longest + config.max_new_tokens,
        max_num_seqs=config.micro_rollout_batch_size,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        tensor_parallel_size=settings.tensor_parallel_size,
        distributed_executor_backend="external_launcher" if group.size > 1 else "uni",
        enforce_eager=settings.enforce_eager,
        enable_sleep_mode=settings.sleep,
        logprobs_mode="processed_logprobs",
    )
    if settings.sleep:
        llm.sleep(level=2)
    return VLLMSampler(module, llm, policy, stop_ids, config)


def refuse_untied(model: nn.Module) -> None:
    """Refuse an adapter on one of two layers that share a weight, which vLLM would go on sharing.

    Raises:
        UserError: naming the weights.
    """
    sharing: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        sharing.setdefault(id(parameter), []).append(name)
    for names in sharing.values():
        if len(names) > 1 and any(".base_layer." in name or ".original_module." in name for name in names):
            raise UserError(
                f"sampler=vllm: the adapter is on one of {' and '.join(names)}, which share a weight; leave it out of the "
                "adapter, or set sampler=engine"
            )


class VLLMSampler:
    """Samples responses by vLLM; every call first gives it the policy's weights. A collective operation."""

    def __init__(
        self, vllm: ModuleType, llm: LLM, policy: Engine, stop_ids: Sequence[int], config: SamplingSettings
    ) -> None:
        self._vllm, self._llm, self._policy = vllm, llm, policy
        self._stop_ids, self._settings = list(stop_ids), config.vllm

    def __call__(self, prompts: Sequence[Sequence[int]], numbers: Sequence[int], sampling: SamplingConfig) -> Responses:
        """One response to each of this rank's prompts; arguments as for `Sampler`."""
        group, parallel = self._policy.process_group, self._settings.tensor_parallel_size
        rows = [(list(prompt), number) for prompt, number in zip(prompts, numbers, strict=True)]
        first = group.rank // parallel * parallel
        parts = group.gather_objects(rows)[first : first + parallel] if parallel > 1 else [rows]
        start = sum(map(len, parts[: group.rank - first]))
        together = [row for part in parts for row in part]
        if self._settings.sleep:
            self._llm.wake_up(tags=["weights"])
        self._copy_weights()
        if self._settings.sleep:
            self._llm.wake_up(tags=["kv_cache"])
        if self._llm.reset_prefix_cache() is False:
            raise RuntimeError("vLLM kept the cache of earlier weights: reset_prefix_cache failed")
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in together],
            [self._params(sampling, number) for _, number in together],
            use_tqdm=False,
        )
        if self._settings.sleep:
            self._llm.sleep(level=2)
        drawn = [output.outputs[0] for output in outputs[start : start + len(rows)]]
        return as_responses(drawn, self._stop_ids, greedy=sampling.temperature == 0)

    @torch.no_grad()
    def _copy_weights(self) -> None:
        from alignment.adapters.attach import merged_state

        backend = self._policy.backend
        model = cast(NativeModel | ExternalModel, backend.unwrapped)
        with backend.full_parameters():
            tensors = named_as_saved(model, merged_state(model, model.state_dict()))
            missing = [name for names in self._llm.apply_model(partial(load_weights, tensors)) for name in names]
        if missing:
            raise RuntimeError(f"vLLM's parameters {', '.join(missing)} did not get the policy's weights")

    def _params(self, sampling: SamplingConfig, number: int) -> object:
        if sampling.no_repeat_ngram_size:
            raise ValueError("vLLM has no no_repeat_ngram_size")
        return self._vllm.SamplingParams(
            n=1,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            min_tokens=sampling.min_new_tokens,
            max_tokens=sampling.max_new_tokens,
            seed=row_seed(sampling.seed, number),
            stop_token_ids=self._stop_ids,
            ignore_eos=True,  # what ends a response is said by stop_token_ids alone
            logprobs=0,  # of the drawn token
            detokenize=False,
        )


def load_weights(tensors: Iterable[tuple[str, Tensor]], model: nn.Module) -> list[str]:
    """Give weights to a model of vLLM; the names of its parameters that got none, where it says which did."""
    loaded = cast(LoadableModel, model).load_weights(tensors)
    return [] if loaded is None else sorted({name for name, _ in model.named_parameters()} - loaded)


def row_seed(seed: int, number: int) -> int:
    """The random seed of a row, of 63 bits."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0]) >> 1


def as_responses(drawn: Sequence[Completion], stop_ids: Sequence[int], *, greedy: bool = False) -> Responses:
    """vLLM's responses as ours.

    A stop token at the maximum length has `length` for its reason, so the last token says whether a response ended. A
    greedy token was certain.

    Raises:
        RuntimeError: vLLM gave a response up.
    """
    for response in drawn:
        if response.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a response for another reason than its end: {response.finish_reason}")
    token_ids = [list(response.token_ids) for response in drawn]
    log_probs = [
        [0.0 if greedy else at[token].logprob for token, at in zip(tokens, response.logprobs, strict=True)]
        for tokens, response in zip(token_ids, drawn, strict=True)
    ]
    return Responses(token_ids, log_probs, [tokens[-1] in stop_ids for tokens in token_ids])
