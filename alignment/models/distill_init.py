"""A smaller model out of a larger one of the same family: embeddings, head and evenly spaced layers taken over."""

from typing import Any

import torch
from torch import nn

from alignment.errors import UserError


def spaced_layers(few: int, many: int) -> list[int]:
    """Which of `many` layers `few` are taken, evenly spaced, the last among them: 3 of 6 are 1, 3, 5."""
    return [(i + 1) * many // few - 1 for i in range(few)]


@torch.no_grad()
def init_from_teacher(student: Any, teacher: Any) -> None:
    """Overwrite the student's weights with the teacher's, each of its layers by one of the teacher's.

    Raises:
        UserError: anything but the number of layers differs.

    Source: Sanh et al. 2019, arXiv:1910.01108, section 3 (every second layer).
    """
    theirs = dict(teacher.named_parameters(remove_duplicate=False))
    counts = {name: (len(blocks), len(teacher.get_submodule(name))) for name, blocks in _stacks(student)}
    for name, parameter in student.named_parameters():
        source = theirs.get(_name_in_teacher(name, counts))
        if source is None or source.shape != parameter.shape:
            found = "nothing" if source is None else tuple(source.shape)
            raise UserError(
                f"distillation.copy_layers: the student's {name} is {tuple(parameter.shape)}, the teacher has {found}; "
                "they may differ in their number of layers only"
            )
        parameter.copy_(source)


def _stacks(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """The stacks of blocks by name: one in a trunk, two in an encoder-decoder."""
    return [(name, x) for name, x in model.named_modules() if isinstance(x, nn.ModuleList) and name.endswith("blocks")]


def _name_in_teacher(name: str, counts: dict[str, tuple[int, int]]) -> str:
    for stack, (few, many) in counts.items():
        if name.startswith(f"{stack}."):
            layer, _, rest = name[len(stack) + 1 :].partition(".")
            return f"{stack}.{spaced_layers(few, many)[int(layer)]}.{rest}"
    return name
