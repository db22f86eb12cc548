"""The loss of SFT and its gradient equal those of TRL's SFTTrainer, on the same rows and weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from alignment import load_model
from alignment.algorithms.sft import SFTConfig, language_loss_fn
from alignment.data.batches import Example, collate, collate_whole
from alignment.data.config import DataConfig
from alignment.models.embedding_noise import add_embedding_noise
from alignment.models.huggingface.checkpoint import save_model

pytest.importorskip("trl")

ROWS = [([5, 6, 7, 8, 9, 10], 3), ([11, 12, 13, 14, 15, 16, 17, 18, 19], 2), ([20, 21, 22], 1)]  # ids, prompt tokens
CASES: dict[str, dict[str, Any]] = {
    "whole text": {"loss_on": "all"},
    "completion only": {},
    "label smoothing": {"label_smoothing": 0.1},
    "label smoothing of the whole text": {"label_smoothing": 0.3, "loss_on": "all"},
    "NEFTune": {"neftune_alpha": 5.0},
}


@pytest.fixture(scope="module")
def trainer_of(checkpoints, tmp_path_factory):
    """A trainer of TRL around the tiny Llama, for options of its config."""
    import datasets
    from trl import SFTConfig as TheirConfig
    from trl import SFTTrainer

    rows = datasets.Dataset.from_list(
        [{"input_ids": ids, "completion_mask": [0] * prompt + [1] * (len(ids) - prompt)} for ids, prompt in ROWS]
    )

    def build(**options: Any) -> Any:
        output = str(tmp_path_factory.mktemp("trl"))
        args = TheirConfig(output, report_to=[], use_cpu=True, max_length=None, bf16=False, **options)
        return SFTTrainer(model=checkpoints["llama"], args=args, train_dataset=rows)

    return build


def ours(checkpoint: str, config: SFTConfig, rows: list, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss over the batch, and the gradient of each weight by its name in transformers."""
    model = load_model(checkpoint).train()
    if config.neftune_alpha is not None:
        add_embedding_noise(model, config.neftune_alpha)
    examples = [Example.single(ids, [False] * prompt + [True] * (len(ids) - prompt), "") for ids, prompt in rows]
    (batch,) = (collate_whole if config.loss_on == "all" else collate)(examples, 10**6)
    loss = language_loss_fn(model, token_loss=config.token_loss)(batch).total / batch.weight
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    save_model(model, folder)  # under the names of transformers
    return float(loss), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_trl(case, checkpoints, trainer_of, tmp_path):
    config = SFTConfig(checkpoints["llama"], DataConfig(train="rows.jsonl"), str(tmp_path / "out"), **CASES[case])
    # TRL divides NEFTune's noise by the padded length, ours by each row's own.
    rows = ROWS if config.neftune_alpha is None else ROWS[:1]
    trainer = trainer_of(
        completion_only_loss=config.loss_on == "completion",
        label_smoothing_factor=config.label_smoothing,
        neftune_noise_alpha=config.neftune_alpha,
    )
    model = trainer.model.train()
    if config.neftune_alpha is not None:
        from transformers.integrations.neftune import activate_neftune

        activate_neftune(model, config.neftune_alpha, trainer.accelerator)
    inputs = trainer.data_collator([trainer.train_dataset[number] for number in range(len(rows))])
    torch.manual_seed(0)
    theirs = trainer.compute_loss(model, inputs)
    theirs.backward()
    torch.manual_seed(0)
    loss, gradients = ours(checkpoints["llama"], config, rows, tmp_path / "gradients")
    assert loss == pytest.approx(float(theirs), abs=1e-5)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert_close(gradient, expected[name], atol=1e-5, rtol=0)
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-2
