"""What BLOOM, Falcon and GPT-NeoX share: matrices fused head by head, their token classifier, older names of keys."""

from collections.abc import Callable, Mapping
from typing import Any

from alignment.models.families.family import Task, labels_of
from alignment.models.heads import ClassificationHeadSpec
from alignment.models.layers import AttentionSpec


def fused_by_key_head(name: str) -> dict[str, Callable[[Any], int]]:
    """For `Family.interleaved`: rows of `name` are, key head by key head, its queries, the key and the value."""

    def groups(spec: Any) -> int:
        attention = spec.blocks[0].attention
        assert isinstance(attention, AttentionSpec)
        return attention.key_value_heads

    return dict.fromkeys((f"{name}.weight", f"{name}.bias"), groups)


def dropped_token_task(hf_class: str, dropout: Callable[[Mapping[str, Any]], float]) -> Task:
    """A token classifier whose layer is named `classifier` and reads its input after `dropout(config)`."""
    names = (("classifier.weight", "head.output.weight"), ("classifier.bias", "head.output.bias"))
    return Task(hf_class, names, lambda config: ClassificationHeadSpec(labels_of(config), dropout=dropout(config)))


def classifier_dropout(config: Mapping[str, Any]) -> float:
    """`classifier_dropout`, or `hidden_dropout` where there is none: BLOOM's and Falcon's rule."""
    own = config.get("classifier_dropout")
    return config.get("hidden_dropout", 0.0) if own is None else own


def with_present_names(config: Mapping[str, Any], old_names: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """The config with today's names of its keys, and a problem for each that is there under both and differs.

    Args:
        old_names: old name -> today's.
    """
    renamed = {key: value for key, value in config.items() if key not in old_names}
    problems = []
    for old, name in old_names.items():
        if old in config and renamed.setdefault(name, config[old]) != config[old]:
            problems.append(f"config.json: {old} = {config[old]!r} and {name} = {renamed[name]!r} are the same thing")
    return renamed, problems
