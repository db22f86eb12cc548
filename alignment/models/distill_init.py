"""Initialization of a student model for distillation: embeddings, head and evenly spaced layers of its teacher."""

import torch
from torch import nn

from alignment.errors import UserError


def spaced_layers(few: int, many: int) -> list[int]:
    """Indices of `few` evenly spaced layers among `many`, the last one included: 1, 3, 5 for 3 of 6."""
    return [(i + 1) * many // few - 1 for i in range(few)]


@torch.no_grad()
def init_from_teacher(student: nn.Module, teacher: nn.Module) -> None:
    """Copy the teacher's weights into the student, evenly spaced layers of the teacher into the student's layers.

    Args:
        student: a model of the same family with at most as many layers; it is changed.
        teacher: a trained model.

    Raises:
        UserError: the models differ in anything but the number of layers.

    Source: Sanh et al. 2019, arXiv:1910.01108, section 3 (every second layer).
    """
    teacher_parameters = dict(teacher.named_parameters(remove_duplicate=False))
    counts = {name: (len(blocks), len(_blocks(teacher)[name])) for name, blocks in _blocks(student).items()}
    for name, parameter in student.named_parameters():
        source = teacher_parameters.get(_name_in_teacher(name, counts))
        if source is None or source.shape != parameter.shape:
            found = "nothing" if source is None else tuple(source.shape)
            raise UserError(
                f"distillation.copy_layers: the student's {name} is {tuple(parameter.shape)}, the teacher has {found}; "
                "they may differ in their number of layers only"
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
