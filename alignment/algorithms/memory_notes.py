"""What a run's networks hold in memory, by role, in words: said before the first update."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from alignment.models.shared_weights import refuse_trained
from alignment.models.weight_bytes import held_bytes, written
from alignment.training import Engine, Run
from alignment.training.optimizers import hidden_matrices, optimizer_bytes, trainable_parameters


@dataclass(frozen=True)
class Role:
    """A network of a run.

    Attributes:
        name: policy, value model, reward model or reference.
        model: its modules; None where it has none of its own.
        engine: of one that trains.
        remark: what it is, where it has no modules of its own.
    """

    name: str
    model: nn.Module | None
    engine: Engine | None = None
    remark: str = ""


def note_memory(run: Run, roles: Sequence[Role]) -> None:
    """Note a line per role, and one for all: bytes of weights on this process, of gradients and of optimizer state.

    Gradients and optimizer state are those after the first update, of all processes that divide them together. Activations
    and caches are not counted.

    Raises:
        ValueError: one network trains a weight that another one holds.
    """
    models = {role.name: role.model for role in roles if role.model is not None}
    refuse_trained(models)
    held = {name: held_bytes(model) for name, model in models.items()}
    gradients = optimizers = 0
    for role in roles:
        if role.model is None:
            run.note(f"memory: {role.name}: {role.remark}, no weights of its own")
            continue
        own = held[role.name]
        others = [name for name, part in held.items() if name != role.name and own.keys() & part.keys()]
        sharing = f" (some shared with {' and '.join(others)})" if others else ""
        trains = "nothing of it trains"
        if role.engine is not None:
            trained = trainable_parameters(role.model)
            shapes = {name: tuple(parameter.shape) for name, parameter in trained.items()}
            optimizer = optimizer_bytes(shapes, role.engine.config, hidden=hidden_matrices(role.model))
            count = sum(parameter.numel() for parameter in trained.values())
            gradients, optimizers = gradients + 4 * count, optimizers + optimizer
            trains = (
                f"trains {count:,} numbers: {written(4 * count)} of gradients, {written(optimizer)} of optimizer state"
            )
        run.note(f"memory: {role.name}: {written(sum(own.values()))} of weights{sharing}; {trains}")
    together = {key: size for part in held.values() for key, size in part.items()}
    run.note(
        f"memory: together {written(sum(together.values()))} of weights, {written(gradients)} of gradients, "
        f"{written(optimizers)} of optimizer state"
    )
