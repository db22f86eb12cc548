"""Tiny models of each family and random documents, for the tests of the stack."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from alignment.models.build import build_language_model, build_scalar_model
from alignment.models.huggingface.checkpoint import save_model
from alignment.ragged import Ragged

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "vocab_size": 61, "n_positions": 96, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama": {
        "model_type": "llama",
        "vocab_size": 61,
        "max_position_embeddings": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
PARITY_CASES = {  # by family: `model_type`, `kind`, `config` and the `variants` of it
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parents[2] / "scripts" / "parity_cases").glob("*.yaml"))
}
DECODERS = {name: case for name, case in PARITY_CASES.items() if case["kind"] == "decoder"}
LENGTHS = (40, 7, 1, 33, 40, 12)


def roughen(model: Any, seed: int = 0) -> Any:
    """Weights far enough from their initial values for every part to matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn(parameter.shape, generator=generator)
    return model


def written_by_transformers(directory, model_type: str, config: dict[str, Any], door="AutoModelForCausalLM", **more):
    """A random model of one of transformers' auto classes, saved by it."""
    import transformers

    torch.manual_seed(0)
    keys = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **config, **more}
    settings = transformers.AutoConfig.for_model(model_type, **keys)
    model = roughen(getattr(transformers, door).from_config(settings)).eval()
    model.save_pretrained(directory)
    return model


@pytest.fixture(params=sorted(CONFIGS))
def config(request) -> dict[str, Any]:
    return dict(CONFIGS[request.param])


@pytest.fixture
def model(config):
    return roughen(build_language_model(config))


@pytest.fixture
def scalar_model(config):
    return roughen(build_scalar_model(config))


@pytest.fixture
def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(61, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture
def batch(documents) -> Ragged:
    return Ragged.build(documents)


@pytest.fixture(scope="session")
def low(tmp_path_factory):
    """`low("qwen3", torch.bfloat16)` -> a tiny checkpoint in a lower type; "stablelm" runs as transformers' class."""
    written = {}

    def write(family, dtype=torch.bfloat16, **changes):
        key = (family, dtype, *changes.items())
        if key not in written:
            written[key] = write_low(tmp_path_factory.mktemp(family), family, dtype, changes)
        return written[key]

    return write


def write_low(folder, family, dtype, changes):
    torch.manual_seed(0)
    if family == "stablelm":
        from transformers import StableLmConfig, StableLmForCausalLM

        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        StableLmForCausalLM(StableLmConfig(vocab_size=211, **sizes, **heads)).to(dtype).save_pretrained(folder)
        return folder
    case = PARITY_CASES[family]
    model = build_language_model({"model_type": case["model_type"], **case["config"], **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)  # biases and norms matter too
    save_model(model.to(dtype), folder)
    return folder
