"""What a run's networks hold in memory, by role, in words: said before the first update."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from alignment.models.shared_weights import refuse_trained
from alignment.models.weight_bytes import Bytes, held_bytes, written
from alignment.training import Engine, Run
from alignment.training.optim import hidden_matrices, optimizer_bytes, trainable_parameters


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
    """Note in the run what its networks hold.

    Raises:
        ValueError: one of them trains a weight that another one holds.
    """
    refuse_trained({role.name: role.model for role in roles if role.model is not None})
    for line in memory_notes(roles):
        run.note(line)


def memory_notes(roles: Sequence[Role]) -> Iterator[str]:
    """One line per role, and one for all: bytes of weights on this process, what is shared, gradients and optimizer.

    Gradients and optimizer state are those after the first update; where FSDP2 or ZeRO divides them among processes, they
    are given for all processes together. Activations and caches are not counted.
    """
    held = {role.name: held_bytes(role.model) for role in roles if role.model is not None}
    gradients = optimizers = 0
    for role in roles:
        if role.model is None:
            yield f"memory: {role.name}: {role.remark}, no weights of its own"
            continue
        line = f"memory: {role.name}: {written(sum(held[role.name].values()))} of weights{_sharing(role.name, held)}"
        if role.engine is None:
            yield f"{line}; nothing of it trains"
            continue
        count = sum(parameter.numel() for parameter in role.model.parameters() if parameter.requires_grad)
        gradient, optimizer = 4 * count, _optimizer_bytes(role.engine)
        gradients, optimizers = gradients + gradient, optimizers + optimizer
        yield (
            f"{line}; trains {count:,} numbers: {written(gradient)} of gradients, {written(optimizer)} of optimizer state"
        )
    together: Bytes = {}
    for part in held.values():
        together |= part
    yield (
        f"memory: together {written(sum(together.values()))} of weights, {written(gradients)} of gradients, "
        f"{written(optimizers)} of optimizer state{_division(roles)}"
    )


def _sharing(name: str, held: dict[str, Bytes]) -> str:
    """How much of a network's weights belongs to other networks too, and to which."""
    own = held[name]
    others = [other for other, part in held.items() if other != name and own.keys() & part.keys()]
    shared = sum(size for key, size in own.items() if any(key in held[other] for other in others))
    return f" ({written(shared)} of them shared with {' and '.join(others)})" if others else ""


def _optimizer_bytes(engine: Engine) -> int:
    """Bytes of the optimizer's state after the first update, on all processes that divide it together."""
    model = engine.backend.unwrapped
    shapes = {name: tuple(parameter.shape) for name, parameter in trainable_parameters(model).items()}
    return optimizer_bytes(shapes, engine.config, hidden=hidden_matrices(model))


def _division(roles: Sequence[Role]) -> str:
    groups = [role.engine.process_group for role in roles if role.engine is not None]
    if not groups or groups[0].size == 1:
        return ""
    if groups[0].kind == "ddp":
        return f" on each of {groups[0].size} processes"
    return f"; weights on each of {groups[0].size} processes, which divide the rest: every network is sharded by itself"
