"""Parts that BLOOM, Falcon and GPT-NeoX share: matrices fused head by head, token classifiers, legacy config keys."""

from collections.abc import Callable, Mapping
from typing import Any

from alignment.models.families.family import Task, num_labels
from alignment.models.heads import ClassificationHeadSpec
from alignment.models.layers import AttentionSpec
from alignment.models.safetensors_files import HFConfig


def fused_by_key_head(name: str) -> dict[str, Callable[[Any], int]]:
    """For `Family.interleaved`: `name` has, for each key head, the rows of its queries, of the key and of the value."""

    def groups(spec: Any) -> int:
        attention = spec.blocks[0].attention
        assert isinstance(attention, AttentionSpec)
        return attention.key_value_heads

    return dict.fromkeys((f"{name}.weight", f"{name}.bias"), groups)


def dropped_token_task(hf_class: str, dropout: Callable[[HFConfig], float]) -> Task:
    """The task of a token classifier whose layer is named `classifier`, with dropout on its input."""
    names = (("classifier.weight", "head.output.weight"), ("classifier.bias", "head.output.bias"))
    return Task(hf_class, names, lambda config: ClassificationHeadSpec(num_labels(config), dropout=dropout(config)))


def classifier_dropout(config: HFConfig) -> float:
    """`classifier_dropout`, by default `hidden_dropout`, in BLOOM and Falcon."""
    own = config.get("classifier_dropout")
    return config.get("hidden_dropout", 0.0) if own is None else own


def with_present_names(config: HFConfig, old_names: Mapping[str, str]) -> tuple[HFConfig, list[str]]:
    """The config with the present names of its keys, and a problem for each key whose two names have different values.

    Args:
        config: a Hugging Face config.
        old_names: legacy name -> present name.
    """
    present = {key: value for key, value in config.items() if key not in old_names}
    problems = []
    for old, name in old_names.items():
        if old in config and present.setdefault(name, config[old]) != config[old]:
            problems.append(f"config.json: {old} = {config[old]!r} and {name} = {present[name]!r} are the same thing")
    return present, problems
