"""What the package needs to know about each kind of adapter; a new kind is one more entry of `KINDS`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from alignment.adapters import bottleneck, ia3, lora, lora_files, prefix, prompt
from alignment.adapters.specs import AdapterSpec
from alignment.models.external.models import ExternalModel
from alignment.models.native_model import NativeModel

if TYPE_CHECKING:
    from peft import PeftConfig

    from alignment.adapters.bottleneck import BottleneckConfig

AnyModel = NativeModel[Any] | ExternalModel


@dataclass(frozen=True)
class AdapterKind:
    """The functions of one kind of adapter.

    Attributes:
        is_file: whether the content of an adapter_config.json is of this kind.
        attach: (model, settings) -> freezes the model and adds a new adapter to it; UserError where it does not fit.
        is_attached: whether the model has such an adapter.
        switched_off: a context in which the adapter does not act.
        merge: puts the adapter into the weights and removes it, all weights trainable; or says why that cannot be.
        holds: whether a name of the model's state dict is one of the adapter's weights.
        to_file: (model, its adapter's state by our names) -> tensors and config in peft's format, without the score
            head of a scalar model and without what names the base model.
        read_spec: (content of adapter_config.json, directory) -> the settings.
        from_file: (model, settings, tensors of the file, directory) -> attaches the adapter, takes its tensors out of
            the mapping and returns them by our names, None where one is missing.
        own_settings: (model, its adapter's state) -> content of alignment_adapter.json beside peft's files; None: the
            base model's place alone.
        before_head: what precedes `score.weight` in the file of a scalar model's adapter.
    """

    is_file: Callable[[Mapping[str, object]], bool]
    attach: Callable[..., object]
    is_attached: Callable[[AnyModel], bool]
    switched_off: Callable[[AnyModel], AbstractContextManager[None]]
    merge: Callable[[Any], object] | str
    holds: Callable[[str], bool]
    to_file: Callable[[Any, dict[str, Tensor]], "tuple[dict[str, Tensor], PeftConfig | BottleneckConfig]"]
    read_spec: Callable[[Mapping[str, object], Path], AdapterSpec]
    from_file: Callable[[Any, Any, dict[str, Tensor], Path], dict[str, Tensor | None]]
    own_settings: Callable[[Any, dict[str, Tensor]], dict[str, object]] | None = None
    before_head: str = "base_model.model."


@contextmanager
def _flag_off(model: AnyModel, *, flag: str) -> Iterator[None]:
    """Set an attribute of the model to False within the block, also when the block raises."""
    before = getattr(model, flag)
    setattr(model, flag, False)
    try:
        yield
    finally:
        setattr(model, flag, before)


_LORA = AdapterKind(
    is_file=lora_files.is_lora_file,
    attach=lora.attach_lora,
    is_attached=lora.has_plain_lora,
    switched_off=lora.lora_switched_off,
    merge=lora.merge_lora,
    holds=lora.is_lora_weight,
    to_file=lora_files.lora_to_file,
    read_spec=lora_files.read_lora_spec,
    from_file=lora_files.lora_from_file,
    own_settings=lora_files.lora_settings,
)
KINDS: dict[str, AdapterKind] = {
    "lora": _LORA,
    "dora": replace(_LORA, is_file=lora_files.is_dora_file, is_attached=lora.has_dora),
    "ia3": AdapterKind(
        is_file=ia3.is_ia3_file,
        attach=ia3.attach_ia3,
        is_attached=ia3.has_ia3,
        switched_off=ia3.ia3_switched_off,
        merge=ia3.merge_ia3,
        holds=ia3.is_ia3_weight,
        to_file=ia3.ia3_to_file,
        read_spec=ia3.read_ia3_spec,
        from_file=ia3.ia3_from_file,
        own_settings=ia3.ia3_settings,
    ),
    "prefix": AdapterKind(
        is_file=lambda config: config.get("peft_type") == "PREFIX_TUNING",
        attach=prefix.attach_prefix,
        is_attached=lambda model: model.prefix is not None,
        switched_off=partial(_flag_off, flag="prefix_enabled"),
        merge="a prefix adapter is no change of weights and cannot be merged; keep it as an adapter directory",
        holds=lambda name: name.startswith("prefix."),
        to_file=prefix.prefix_to_file,
        read_spec=prefix.read_prefix_spec,
        from_file=prefix.prefix_from_file,
        before_head="base_model.",
    ),
    "prompt": AdapterKind(
        is_file=lambda config: config.get("peft_type") == "PROMPT_TUNING",
        attach=prompt.attach_prompt,
        is_attached=lambda model: model.soft_prompt is not None,
        switched_off=partial(_flag_off, flag="soft_prompt_enabled"),
        merge="a soft prompt is no change of weights and cannot be merged; keep it as an adapter directory",
        holds=lambda name: name.startswith("soft_prompt."),
        to_file=prompt.prompt_to_file,
        read_spec=prompt.read_prompt_spec,
        from_file=prompt.prompt_from_file,
        before_head="base_model.",
    ),
    "bottleneck": AdapterKind(
        is_file=lambda config: config.get("peft_type") == bottleneck.PEFT_TYPE,
        attach=bottleneck.attach_bottleneck,
        is_attached=bottleneck.has_bottleneck,
        switched_off=bottleneck.bottleneck_switched_off,
        merge=(
            "a bottleneck adapter has a non-linearity, so that it cannot be merged into weights, and peft has no such "
            "adapter and does not open its files; keep it as an adapter directory, which this library loads"
        ),
        holds=bottleneck.is_bottleneck_weight,
        to_file=bottleneck.bottleneck_to_file,
        read_spec=bottleneck.read_bottleneck_spec,
        from_file=bottleneck.bottleneck_from_file,
    ),
}


def kinds_attached(model: AnyModel) -> list[AdapterKind]:
    """The kinds of adapter that a model has."""
    return [kind for kind in KINDS.values() if kind.is_attached(model)]
