"""A value head on the trunk of a language model: one forward gives log-probabilities and values. It is never exported."""

import torch
from torch import nn

from alignment.errors import UserError
from alignment.models.language_model import LanguageModel


def attach_value_head(model: nn.Module) -> None:
    """Give a decoder a trainable value head of zeros, as `model.value_head`.

    Raises:
        UserError: the model is run by transformers, or its weights are not in memory.
    """
    if not isinstance(model, LanguageModel):
        raise UserError(
            "value_model=shared needs a policy of an architecture of this library, and this one is run by transformers; "
            "set value_model=policy or reward_model"
        )
    weight = model.trunk.embed.weight
    if weight.is_meta:
        raise UserError(
            "value_model=shared runs in one process or with DDP, where the whole policy lies on every device; with FSDP2 "
            "or ZeRO set value_model=policy or reward_model"
        )
    spec = model.trunk.spec
    head = nn.Linear(spec.output_width or spec.width, 1, bias=False, device=weight.device, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    model.value_head = head
