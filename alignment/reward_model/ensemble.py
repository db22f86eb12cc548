"""An ensemble of adapters over one frozen base: k scalar models that share every weight but adapter and head.

An ensemble of heads needs no class of its own: the rows of one head on one trunk (see `ScalarModel`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alignment.models.activation_checkpointing import Keep
from alignment.models.classifiers import ScalarModel
from alignment.models.external.models import ExternalScalarModel
from alignment.models.outputs import ValueOutput, value_output
from alignment.models.safetensors_files import HFConfig
from alignment.ragged import Ragged


class AdapterEnsemble(nn.Module):
    """Scalar models with an adapter and a head each over the same frozen weights; a token's number is their mean.

    Attributes:
        members: the models; their frozen parameters are the same objects.
        config: config.json of the base.
    """

    task = "scalar"

    def __init__(self, members: Sequence[ScalarModel | ExternalScalarModel]):
        super().__init__()
        self.members = nn.ModuleList(members)

        self.config: HFConfig = members[0].config

    @property
    def models(self) -> list[ScalarModel | ExternalScalarModel]:
        """The members by their type."""
        return [member for member in self.members if isinstance(member, ScalarModel | ExternalScalarModel)]

    @property
    def spec(self) -> Any:
        """Sizes of the base."""
        return self.models[0].spec

    def virtual_tokens(self) -> int:
        """Positions that a prefix or soft prompt takes in front of every document."""
        return self.models[0].virtual_tokens()

    def checkpoint_activations(self, enabled: bool = True, keep: Keep = "nothing") -> None:
        """Recompute blocks in the backward pass; see `NativeModel.checkpoint_activations`."""
        for member in self.models:
            member.checkpoint_activations(enabled, keep)

    def forward(self, *, batch: Ragged, tokens: Tensor | None = None) -> ValueOutput:
        """Values of every token, [N], or of `tokens`, [M], and the values by each member, [N, k] or [M, k]."""
        return value_output(torch.stack([member(batch=batch, tokens=tokens).values for member in self.members], -1))
