"""Settings of vLLM where it samples the responses, and what they must not be."""

from dataclasses import dataclass
from typing import Literal

Sampler = Literal["engine", "vllm"]
LEAST_TEMPERATURE = 0.01  # vLLM raises those between 0 and this one


@dataclass(frozen=True)
class VLLMConfig:
    """How vLLM runs beside the training, on the GPU of each process.

    Attributes:
        gpu_memory_utilization: share of the GPU's memory for its weights and cache; the rest is for training.
        tensor_parallel_size: processes that hold one copy of the weights together and sample each other's responses.
        enforce_eager: run without CUDA graphs: slower, starts sooner, and takes less memory.
        sleep: give the memory back while the policy trains; its weights are copied again before the next samples.
    """

    gpu_memory_utilization: float = 0.3
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    sleep: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.gpu_memory_utilization < 1:
            raise ValueError(f"gpu_memory_utilization must be between 0 and 1, got {self.gpu_memory_utilization}")
        if self.tensor_parallel_size < 1:
            raise ValueError(f"tensor_parallel_size must be at least 1, got {self.tensor_parallel_size}")


def check_sampler(sampler: Sampler, vllm: VLLMConfig, temperature: float, rollout_weights: str) -> None:
    """Refuse settings that do not go with the sampler.

    Raises:
        ValueError: in words.
    """
    if sampler == "engine" and vllm != VLLMConfig():
        raise ValueError("vllm is not read with sampler=engine; leave it out, or set sampler=vllm")
    if sampler == "vllm" and temperature < LEAST_TEMPERATURE:
        raise ValueError(f"temperature must be at least {LEAST_TEMPERATURE} with sampler=vllm, got {temperature}")
    if sampler == "vllm" and rollout_weights == "sharded":
        raise ValueError("rollout_weights=sharded goes with sampler=engine: vLLM's weights are copied from whole ones")
