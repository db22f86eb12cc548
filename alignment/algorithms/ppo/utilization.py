"""Model FLOPs utilization (MFU): the share of the devices' peak rate that each phase of a PPO iteration reaches."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from alignment.algorithms.memory_notes import Role
from alignment.algorithms.ppo.config import PPOConfig
from alignment.models.operations import forward_operations, is_counted
from alignment.models.transformer import TransformerSpec
from alignment.training.distributed import ProcessGroup
from alignment.training.speed import peak_tflops

BACKWARD = 2  # times the operations of a forward; what is recomputed for want of memory does not count


def utilization(
    metrics: Mapping[str, float],
    config: PPOConfig,
    roles: Sequence[Role],
    group: ProcessGroup,
    *,
    documents: Sequence[int],
) -> dict[str, float]:
    """`mfu` of an iteration and of its phases: operations / (seconds * peak rate of all devices).

    Counted are the matrix products and attention of sampling, of the forwards of policy, reference and value model, and
    of the updates, without the pretraining mix; scoring is left out of operations and seconds.

    Args:
        metrics: of the iteration, with `seconds_NAME` of each phase, and `updates` where some were left out.
        roles: the networks.
        documents: tokens of prompt and response of each of this rank's rows; the other ranks' are much alike.

    Returns:
        `mfu`, `mfu_sampling`, `mfu_forward`, `mfu_policy` and `mfu_value`; nothing where the operations of a network or
        the device's peak rate are not known.
    """
    peak = peak_tflops(group.device, config.training.precision)
    models = {role.name: role.model for role in roles if role.name in ("policy", "reference", "value model")}
    if peak is None or "policy" not in models:
        return {}
    tokens = sum(documents)
    forward = {
        name: operations_per_token(models["policy"] if model is None else model, tokens // len(documents))
        for name, model in models.items()
    }
    if not all(forward.values()):
        return {}
    passes = metrics.get("updates", config.epochs * config.minibatches) / config.minibatches
    work = {"sampling": forward["policy"], "forward": sum(forward.values())}
    work["policy"] = passes * (1 + BACKWARD) * forward["policy"]
    work["value"] = passes * (1 + BACKWARD) * forward.get("value model", 0.0)
    seconds = {name: metrics.get(f"seconds_{name}", 0.0) for name in work}
    available = {name: seconds[name] * peak * 1e12 / tokens for name in work if seconds[name] > 0 and work[name] > 0}
    if not available:
        return {}
    whole = sum(work[name] for name in available) / sum(available.values())
    return {"mfu": whole} | {f"mfu_{name}": work[name] / available[name] for name in available}


def operations_per_token(model: nn.Module | None, length: int) -> float:
    """Operations of a forward per token of documents of `length` tokens; 0 where they are not known.

    A network that gives one number per token has a head of one row.
    """
    spec = getattr(model, "spec", None)
    if not isinstance(spec, TransformerSpec) or not is_counted(spec):
        return 0.0
    if getattr(model, "task", None) == "scalar":
        spec = replace(spec, vocabulary=1)
    return forward_operations(spec, max(1, length))
