"""Losses of reward models and their gradients equal those of TRL's RewardTrainer, on the same rows and weights.

TRL has no loss over K ranked responses, over ties or over whole rankings: a ranking of two is compared with its pairs
here, and K responses with the papers' numbers in tests/losses. TRL 1.16 has no trainer for labeled steps any more; theirs
was transformers' token classification with labels 0 and 1 at the ends of steps and -100 elsewhere, which is compared below.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from alignment import load_tokenizer
from alignment.algorithms.reward import RewardLoss, objective_loss_fn
from alignment.data.batches import Example, collate_pairs, collate_rankings, collate_steps
from alignment.data.tokenizers.tokenizer import save_tokenizer
from alignment.models.huggingface.checkpoint import load_scalar_model, save_model
from tests.examples import pair_example, ranked_example, sides, step_example

pytest.importorskip("trl")

# Tokens of the prompt, of the chosen and of the rejected response, and the margin.
PAIRS = [
    ([5, 6, 7], [8, 9, 10], [11, 12], 0.5),
    ([13, 14], [15], [16, 17, 18, 19, 20], 0.0),
    ([21], [22, 23, 24, 25], [26, 27, 28], 1.25),
]
CASES = {"plain": (False, 0.0), "margins": (True, 0.0), "centered": (False, 0.3), "margins, centered": (True, 0.3)}


@pytest.fixture(scope="module")
def checkpoint(checkpoints, tmp_path_factory) -> str:
    """A tiny Llama with a score head whose scores differ by more than their rounding."""
    folder = tmp_path_factory.mktemp("scored")
    torch.manual_seed(0)
    model = load_scalar_model(Path(checkpoints["llama"]), new_head="zero")
    torch.nn.init.normal_(model.get_submodule("head").get_parameter("weight"), std=0.5)
    save_model(model, folder)
    save_tokenizer(load_tokenizer(checkpoints["llama"]), folder)
    return str(folder)


def make_pairs(margins: bool) -> list[Example]:
    pairs = []
    for number, (prompt, chosen, rejected, margin) in enumerate(PAIRS):
        sides = [
            Example.single(prompt + response, [False] * len(prompt) + [True] * len(response), str(number))
            for response in (chosen, rejected)
        ]
        pairs.append(pair_example(*sides, margin if margins else None, str(number)))
    return pairs


def gradients_of(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The gradient of each weight of ours, by its name in transformers."""
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    save_model(model, folder)
    return load_file(folder / "model.safetensors")


def ours(checkpoint: str, loss: RewardLoss, batch: Any, center_coef: float, folder: Path) -> tuple[float, dict]:
    """Mean loss over the batch, and the gradients."""
    model = load_scalar_model(Path(checkpoint)).train()
    found = objective_loss_fn(model, loss, center_coef=center_coef)(batch)
    mean = found.total / batch.weight
    mean.backward()
    return mean.item(), gradients_of(model, folder)


def assert_same_gradients(gradients: dict[str, torch.Tensor], expected: dict[str, Any]) -> None:
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert_close(gradient, expected[name], atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-2


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("share_prompts", [False, True])
def test_loss_and_gradient_of_pairs_equal_trl(case, share_prompts, checkpoint, tmp_path):
    import datasets
    from trl import RewardConfig, RewardTrainer

    margins, center_coef = CASES[case]
    rows = [
        {"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected, **({"margin": margin} if margins else {})}
        for prompt, chosen, rejected, margin in PAIRS
    ]
    args = RewardConfig(
        output_dir=str(tmp_path / "trl"), report_to=[], use_cpu=True, bf16=False, max_length=None,
        center_rewards_coefficient=center_coef or None,
    )  # fmt: skip
    trainer = RewardTrainer(model=checkpoint, args=args, train_dataset=datasets.Dataset.from_list(rows))
    model = trainer.model.train()
    theirs = trainer.compute_loss(model, trainer.data_collator(rows))
    theirs.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    pairs = make_pairs(margins)
    [batch] = collate_pairs(pairs, 10**6, share_prompts=share_prompts)
    loss, gradients = ours(checkpoint, "bradley_terry", batch, center_coef, tmp_path / "pairs")
    assert loss == pytest.approx(theirs.item(), abs=1e-5)
    assert_same_gradients(gradients, expected)
    groups = [
        ranked_example((sides(pair)[0], sides(pair)[1]), (0, 1), pair.row_id, margin=pair.values.get("margin"))
        for pair in pairs
    ]
    [batch] = collate_rankings(groups, 10**6, share_prompts=share_prompts)
    loss, gradients = ours(checkpoint, "ranking", batch, center_coef, tmp_path / "rankings")
    assert loss == pytest.approx(theirs.item(), abs=1e-5)
    assert_same_gradients(gradients, expected)


def test_the_loss_of_steps_is_token_classification_with_two_labels(checkpoint, tmp_path):
    """Two logits (0, score) have the cross-entropy of one: only their difference counts, and it is our score."""
    import transformers

    rows = [([5, 6, 7, 8, 9, 10, 11], (3, 6), (True, False)), ([12, 13, 14, 15], (2,), (False,))]
    config = transformers.AutoConfig.from_pretrained(checkpoint, id2label={0: "wrong", 1: "right"})
    scored = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint)
    model = transformers.LlamaForTokenClassification(config).eval()  # its head has dropout
    model.model.load_state_dict(scored.model.state_dict())
    with torch.no_grad():
        model.score.weight[0], model.score.weight[1], model.score.bias[:] = 0.0, scored.score.weight[0], 0.0
    width = max(len(ids) for ids, _, _ in rows)
    labels = torch.full((len(rows), width), -100)
    for row, (_, ends, right) in enumerate(rows):
        labels[row, list(ends)] = torch.tensor(right).long()
    ids = torch.tensor([row + [0] * (width - len(row)) for row, _, _ in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row, _, _ in rows])
    theirs = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    theirs.backward()

    [batch] = collate_steps([step_example(*row, str(i)) for i, row in enumerate(rows)], 10**6)
    loss, gradients = ours(checkpoint, "steps", batch, 0.0, tmp_path / "steps")
    assert loss == pytest.approx(theirs.item(), abs=1e-5)
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if name != "score.bias"}
    assert_close(expected["score.weight"][0], -expected["score.weight"][1])
    assert_same_gradients(gradients, expected | {"score.weight": expected["score.weight"][1:]})
