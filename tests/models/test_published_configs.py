"""Configs as their authors published them are understood, and give models of the size their authors count. No weights here."""

import inspect
import json
from pathlib import Path

import pytest
import torch
import yaml

from alignment.models.build import empty_model
from alignment.models.families import FAMILIES, family_of
from alignment.models.families.config_keys import KEYS, transformers_defaults
from alignment.models.layers import Llama3Scaling

PUBLISHED = yaml.safe_load(Path(__file__).with_name("published_configs.yaml").read_text(encoding="utf-8"))
OLD_HUB = {"architectures": ["AnyLM"], "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": True}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_their_published_size(name):
    expected = PUBLISHED[name]["parameters"]
    with torch.device("meta"):
        model = empty_model({**OLD_HUB, **PUBLISHED[name]["config"]}, "language")
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == expected if isinstance(expected, int) else found / 1e9 == pytest.approx(expected, abs=0.006)


def test_llama_3_2_stretches_its_positions():
    config = PUBLISHED["Llama 3.2 1B"]["config"]
    scaling = family_of(config).spec_from_config(config).blocks[0].attention.rotary.scaling
    assert scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_those_of_transformers(name):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    theirs = {key: value.default for key, value in inspect.signature(CONFIG_MAPPING[name]).parameters.items()}
    expected = {key: value for key, value in theirs.items() if key in KEYS and value is not inspect.Parameter.empty}
    assert transformers_defaults()[name] == json.loads(json.dumps(expected))
