"""The command `alignment doctor`: versions, devices and backends of this machine."""

import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from alignment import __version__
from alignment.config.load import packaged_folder

CORE = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "datasets",
    "peft",
    "accelerate",
    "huggingface-hub",
    "pydantic",
    "scipy",
    "tensorboard",
)
OPTIONAL = {  # package on PyPI -> use
    "deepspeed": "ZeRO: --launch launch/zero2 and launch/zero3",
    "bitsandbytes": "weights.quantize, and optim.name with 8 bits",
    "lm-eval": "lm_eval in alignment evaluate benchmarks",
    "rouge-score": "rouge_l in tasks of alignment evaluate benchmarks",
    "sacrebleu": "bleu in tasks of alignment evaluate benchmarks",
    "vllm": "servers of ppo; an environment of their own is enough",
    "wandb": "training.trackers",
    "mlflow": "training.trackers",
    "trackio": "training.trackers",
}


def examine() -> Iterator[str]:
    """Lines of the report."""
    import torch
    import torch.distributed as dist

    yield f"alignment       {__version__}"
    yield f"python          {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield from (f"{name:15s} {found_version(name) or 'MISSING: install the library again'}" for name in CORE)
    yield ""
    free = shutil.disk_usage(".").free / 2**30
    yield f"cpu             {torch.get_num_threads()} threads, {free:.0f} GB free on this disk"
    if not torch.cuda.is_available():
        yield "cuda            none found; everything runs on the CPU"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}          {device.name}, {device.total_memory / 2**30:.0f} GB"
    on_gpu = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    yield f"bf16            {'yes' if on_gpu else 'on the CPU only'}"
    backends = [name for name in ("gloo", "nccl") if dist.is_available() and getattr(dist, f"is_{name}_available")()]
    yield f"processes       {', '.join(backends) or 'one only: torch was built without distributed'}"
    yield f"attention       {attention_kernel()}"
    yield ""
    for name, use in OPTIONAL.items():
        yield f"{name:15s} {found_version(name) or f'missing: pip install {name}'} ({use})"
    yield ""
    yield "launch files, by name or by path; .sh are scripts to copy"
    for path in sorted((packaged_folder("configs") / "launch").iterdir()):
        yield f"launch/{path.name.removesuffix('.yaml'):18s} {path}"
    if found_version("alignment-handbook"):
        yield "alignment-handbook is installed: its package has the same name, and the two cannot share an environment"


def found_version(name: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def attention_kernel() -> str:
    """The attention kernel for documents of unequal length."""
    import torch

    from alignment.models.layers.sdpa import has_varlen_kernel

    if not torch.cuda.is_available():
        return "scaled-dot-product, documents padded to each other"
    if not all(has_varlen_kernel(index) for index in range(torch.cuda.device_count())):
        return "scaled-dot-product; the variable-length kernel needs compute capability 8.0 (Ampere) or later"
    return "torch's variable-length kernel in bf16, scaled-dot-product in fp32"
