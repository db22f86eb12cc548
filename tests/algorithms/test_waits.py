"""How often training would wait for a GPU: the engine reads what an update has summed, and no micro-batch reads anything."""

from collections import Counter

import pytest
from torch.nn import functional as F

from alignment.adapters import LoRASpec
from alignment.training import Engine, TrainingConfig
from tests.kernels import Waits, choose_as_on_a_gpu

KINDS = ["pretrain", "sft", "sft lora", "reward", "reward lora", "dpo", "dpo lora", "ppo", "ppo lora"]


def count_waits(monkeypatch) -> list[tuple[int, Counter[str]]]:
    """The number of micro-batches of every update that is made from now on, and its waits; models choose as on a GPU."""
    norm = F.rms_norm
    choose_as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(F, "rms_norm", norm)  # it is differentiated here
    found, update = [], Engine.update

    def counted(self, *terms):
        with Waits() as waits:
            made = update(self, *terms)
        found.append((sum(len(term.micro_batches) for term in terms), waits.count))
        return made

    monkeypatch.setattr(Engine, "update", counted)
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_micro_batch_waits_for_nothing(monkeypatch, ran, stage, checkpoints, tmp_path, name):
    kind, *lora = name.split()
    policy, changes = checkpoints["llama"], {"adapter": LoRASpec(rank=4)} if lora else {}
    if kind == "ppo":
        policy, changes = str(stage("sft") / "model"), changes | {"reward_model": str(stage("reward") / "model")}
    updates = count_waits(monkeypatch)
    for output, tokens in (("few", 8192), ("many", 200)):
        training = TrainingConfig(batch_size=8, max_steps=2, micro_batch_tokens=tokens)
        ran(kind, policy, tmp_path / output, training=training, **changes)
    assert {count > 2 for count, _ in updates} == {True, False}  # updates of few micro-batches, and of many
    assert {sum(waits.values()) for _, waits in updates} == {1}, updates  # the sums and the norm, read together
