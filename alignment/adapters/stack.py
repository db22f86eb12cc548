"""A LoRA that a run starts from, kept frozen under the new one: no merged copy of the base weights is needed.

Switching the adapter off leaves the start on. Both are saved as one LoRA of the sum of their ranks over the original base
(see `lora_updates`), an ordinary one for peft.
"""

from dataclasses import replace
from typing import TypeVar, cast

import torch
from torch import nn

from alignment.adapters.lora import DEFAULT, START, activate_loras, attach_lora, lora_layers, lora_updates
from alignment.adapters.lora_files import lora_spec
from alignment.adapters.specs import AdapterSpec, LoRASpec

Model = TypeVar("Model", bound=nn.Module)


def can_stack(start: AdapterSpec, new: AdapterSpec) -> bool:
    """Whether a new adapter can lie on a start with one: both have to be LoRAs, without further parts that train."""
    return all(isinstance(spec, LoRASpec) and not spec.token_rows and not spec.modules_to_save for spec in (start, new))


@torch.no_grad()
def keep_as_start(model: Model) -> Model:
    """Freeze the model's LoRA and make room for a new one on it; return the model.

    Args:
        model: a model with one LoRA, as `load_adapter` leaves it.
    """
    spec = lora_spec(model, lora_updates(model, model.state_dict()))
    del model.peft_config  # peft would warn of several adapters; they are told apart by name in the layers
    with torch.random.fork_rng(devices=[]):  # its random start is overwritten: the new adapter's must not depend on it
        attach_lora(model, replace(spec, dropout=0.0), START)
    for layer in lora_layers(model).values():
        for matrices in (layer.lora_A, layer.lora_B):
            cast(nn.Linear, matrices[START]).weight.copy_(cast(nn.Linear, matrices[DEFAULT]).weight)
        layer.delete_adapter(DEFAULT)
    del model.peft_config
    activate_loras(model)
    return model
