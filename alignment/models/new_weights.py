"""Weights that checkpoints lack: value or span-boundary head, rows for added tokens, student of a teacher's layers."""

import dataclasses

import torch
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.models.heads import LanguageHead, SpanBoundaryHead
from alignment.models.huggingface.weight_map import read_parameters
from alignment.models.init_weights import initialize_layer
from alignment.models.language_model import LanguageModel, MaskedLanguageModel

OWN_FAMILIES_ONLY = (
    "tokens can be added to language models of this library's own decoder families only; add them with transformers"
)


def attach_value_head(model: nn.Module) -> None:
    """Give a decoder of ours whose weights are in memory a trainable value head of zeros, as `model.value_head`."""
    if not isinstance(model, LanguageModel):
        raise UserError(
            "value_model=shared needs a policy of an architecture of this library, and this one is run by "
            "transformers; set value_model=policy or reward_model"
        )
    weight = model.trunk.embed.weight
    if weight.is_meta:
        raise UserError(
            "value_model=shared runs in one process or with DDP, where the whole policy lies on every device; with "
            "FSDP2 or ZeRO set value_model=policy or reward_model"
        )
    spec = model.trunk.spec
    head = nn.Linear(spec.output_width or spec.width, 1, bias=False, device=weight.device, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    model.value_head = head


def attach_span_boundary(model: nn.Module) -> None:
    """Give an encoder of ours whose weights are in memory a new span-boundary head, as `model.span_boundary`."""
    if not isinstance(model, MaskedLanguageModel):
        raise UserError("objective.boundary_coef needs an encoder of this library's own families; set it to 0")
    if model.trunk.embed.weight.is_meta:
        raise UserError("objective.boundary_coef runs in one process or with DDP; with FSDP2 or ZeRO set it to 0")
    assert isinstance(model.head, LanguageHead)
    head = SpanBoundaryHead(model.head, model.spec.output_width or model.spec.width)
    for module in head.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            initialize_layer(module, model.spec.init)
    model.span_boundary = head.to(model.head.weight.device)


@torch.no_grad()
def grow_vocabulary(model: nn.Module, known: int, total: int) -> None:
    """Give a decoder rows for token ids up to `total`; those from `known` on become the mean of the rows before them.

    The mean keeps the new tokens' logits near the average token's, so that they do not take the probability mass of
    others before they are trained. Ties between embedding and head stay.

    Args:
        model: a decoder of this library; embedding and head are read whole where they are unread.
        known: ids that the model was trained on, 0 to `known` - 1; rows above them are padding of its vocabulary.

    Source: Hewitt 2021, "Initializing new word embeddings for pretrained language models".
    """
    if not isinstance(model, LanguageModel):
        raise UserError(OWN_FAMILIES_ONLY)
    embed = model.trunk.embed
    head = model.head
    tied = head.weight is embed.weight
    read_parameters(embed)
    read_parameters(head)
    embed.weight = nn.Parameter(_grown(embed.weight, known, total))
    head.weight = embed.weight if tied else nn.Parameter(_grown(head.weight, known, total))
    if isinstance(bias := getattr(head, "bias", None), Tensor):
        head.bias = nn.Parameter(_grown(bias, known, total))
    if isinstance(offset := getattr(head, "offset", None), Tensor):
        head.offset = _grown(offset[0], known, total)[None]
    embed.num_embeddings = head.out_features = len(embed.weight)
    model.spec = model.trunk.spec = dataclasses.replace(model.spec, vocabulary=len(embed.weight))


def _grown(rows: Tensor, known: int, total: int) -> Tensor:
    """The rows with those from `known` on set to the mean of the ones before; [max(total, rows), ...]."""
    mean = rows[:known].float().mean(dim=0).to(rows.dtype)
    new = torch.cat([rows, mean.expand(max(0, total - len(rows)), *rows.shape[1:])])
    new[known:total] = mean
    return new.contiguous()


def spaced_layers(few: int, many: int) -> list[int]:
    """Indices of `few` evenly spaced layers among `many`, the last one included: 1, 3, 5 for 3 of 6."""
    return [(i + 1) * many // few - 1 for i in range(few)]


@torch.no_grad()
def init_from_teacher(student: nn.Module, teacher: nn.Module) -> None:
    """Copy the teacher's weights into the student, evenly spaced layers of the teacher into the student's layers.

    Raises:
        UserError: the models differ in anything but the number of layers.

    Source: Sanh et al. 2019, arXiv:1910.01108, section 3 (every second layer).
    """
    teacher_parameters = dict(teacher.named_parameters(remove_duplicate=False))
    counts = {name: (len(blocks), len(_blocks(teacher)[name])) for name, blocks in _blocks(student).items()}
    for name, parameter in student.named_parameters():
        source = teacher_parameters.get(_name_in_teacher(name, counts))
        if source is None or source.shape != parameter.shape:
            raise UserError(
                f"distillation.copy_layers: the student's {name} is {tuple(parameter.shape)}, the teacher has "
                f"{'nothing' if source is None else tuple(source.shape)}; they may differ in their number of layers "
                "only"
            )
        parameter.copy_(source)


def _blocks(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The lists of blocks by name: one of a trunk, two of an encoder-decoder."""
    return {name: x for name, x in model.named_modules() if isinstance(x, nn.ModuleList) and name.endswith("blocks")}


def _name_in_teacher(name: str, counts: dict[str, tuple[int, int]]) -> str:
    """The teacher's parameter for one of the student's; `counts` are the numbers of layers of both."""
    for stack, (few, many) in counts.items():
        if name.startswith(f"{stack}."):
            layer, _, rest = name[len(stack) + 1 :].partition(".")
            return f"{stack}.{spaced_layers(few, many)[int(layer)]}.{rest}"
    return name
