"""A scalar model of transformers' class over the trunk of a language model that is already in memory."""

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from alignment.models.external.load import score_settings
from alignment.models.external.models import ExternalLanguageModel, ExternalScalarModel
from alignment.models.external.padding import scores_every_token

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def external_scalar_over(language: ExternalLanguageModel) -> ExternalScalarModel | None:
    """The scalar model with the language model's trunk (the very module, not a copy) and a new head of zeros, fp32.

    Returns:
        None where transformers' class for scores has another trunk than its language model, or more than a linear head.
    """
    trunk = language.inner.base_model
    inner = _empty_scalar(trunk)
    if inner is None or type(inner.base_model) is not type(trunk) or trunk is language.inner:
        return None
    setattr(inner, inner.base_model_prefix, trunk)
    trunk.config.update(score_settings({}))
    inner.config = trunk.config
    new = [module for module in inner.modules() if any(x.is_meta for x in module.parameters(recurse=False))]
    if new != [getattr(inner, "score", None)] or not isinstance(inner.score, nn.Linear):
        return None
    inner.score.to_empty(device=next(trunk.parameters()).device).to(torch.float32)
    nn.init.zeros_(inner.score.weight)
    if inner.score.bias is not None or any(x.is_meta for x in inner.buffers()) or not scores_every_token(inner):
        return None
    return ExternalScalarModel(inner, inner.config.to_dict(), "scalar").eval()


def _empty_scalar(trunk: "PreTrainedModel") -> Any:
    """transformers' class for scores on the meta device; None where there is none for the architecture."""
    from transformers import AutoModelForSequenceClassification

    settings = deepcopy(trunk.config)
    if type(settings) not in AutoModelForSequenceClassification._model_mapping:
        return None
    settings.update(score_settings({}))
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(settings, trust_remote_code=False)
