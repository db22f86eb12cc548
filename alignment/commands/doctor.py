"""The command `alignment doctor`: versions, devices and backends of this machine, or what went wrong in a run."""

import json
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from alignment import __version__
from alignment.config.load import packaged_folder

CORE = (
    "torch", "transformers", "tokenizers", "safetensors", "datasets", "peft", "trl", "accelerate", "pydantic", "scipy",
)  # fmt: skip
OPTIONAL = {  # package on PyPI -> use
    "deepspeed": "ZeRO: --launch launch/zero2 and launch/zero3",
    "bitsandbytes": "weights.quantize, and optim.name with 8 bits",
    "starlette": "alignment serve",
    "uvicorn": "alignment serve",
    "wandb": "training.trackers; mlflow and trackio likewise",
}


def examine() -> Iterator[str]:
    """Lines of the report."""
    import torch

    yield f"alignment     {__version__}"
    yield f"python        {platform.python_version()} on {platform.system()} {platform.machine()}"
    for name in CORE:
        yield f"{name:13s} {found_version(name)}"
    yield ""
    yield f"cpu           {torch.get_num_threads()} threads, {free_gigabytes():.0f} GB free on this disk"
    if not torch.cuda.is_available():
        yield "cuda          none found; everything runs on the CPU"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}        {device.name}, {device.total_memory / 2**30:.0f} GB"
    on_gpu = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    yield f"bf16          {'yes' if on_gpu else 'on the CPU only'}"
    yield f"processes     {', '.join(process_backends()) or 'one only: torch was built without distributed'}"
    yield f"attention     {attention_kernel()}"
    yield ""
    for package, use in OPTIONAL.items():
        yield f"{package:13s} {found_version(package, f'missing: pip install {package}')} ({use})"
    yield ""
    yield "launch files, by name or by path; .sh are scripts to copy"
    for path in sorted((packaged_folder("configs") / "launch").iterdir()):
        yield f"launch/{path.name.removesuffix('.yaml'):18s} {path}"
    if is_shadowed():
        yield "alignment-handbook is installed: its package has the same name, and the two cannot share an environment"


def examine_run(directory: str, *, as_json: bool = False) -> Iterator[str]:
    """Lines of the report on a run.

    Raises:
        UserError: the directory is not a run's, or nothing is logged in it.
    """
    from alignment.evaluation.diagnosis import diagnose, report_json, report_lines
    from alignment.evaluation.run_log import read_run_log

    log = read_run_log(directory)
    findings = diagnose(log)
    if as_json:
        yield json.dumps(report_json(directory, log, findings), indent=2, ensure_ascii=False)
    else:
        width = max(60, min(120, shutil.get_terminal_size().columns - 1))
        yield from report_lines(directory, log, findings, width)


def found_version(name: str, missing: str = "MISSING: install the library again") -> str:
    """Version of an installed distribution, or the text `missing`."""
    try:
        return version(name)
    except PackageNotFoundError:
        return missing


def free_gigabytes() -> float:
    """Free space where runs would be written."""
    return shutil.disk_usage(".").free / 2**30


def process_backends() -> list[str]:
    """Backends of torch.distributed for several processes."""
    import torch.distributed as dist

    if not dist.is_available():
        return []
    return [name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there]


def attention_kernel() -> str:
    """The attention kernel for documents of unequal length."""
    import torch

    from alignment.models.layers.sdpa import has_varlen_kernel

    if not torch.cuda.is_available():
        return "scaled-dot-product, documents padded to each other"
    if not all(has_varlen_kernel(index) for index in range(torch.cuda.device_count())):
        return "scaled-dot-product; the variable-length kernel needs compute capability 8.0 (Ampere) or later"
    return "torch's variable-length kernel in bf16, scaled-dot-product in fp32"


def is_shadowed() -> bool:
    """Whether alignment-handbook, whose package is also named `alignment`, is in this environment."""
    try:
        version("alignment-handbook")
    except PackageNotFoundError:
        return False
    return True
