"""Losses of DPO's family beside trl's own: values and gradients, on tensors and on a model with a batch.

Where trl departs from the paper, the test says how the two are related.
"""

import contextlib
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from alignment.algorithms.dpo import DPOConfig, dpo_loss_fn
from alignment.algorithms.dpo.global_inputs import GlobalInputs, with_positions
from alignment.data.batches import Example, collate_labeled, collate_pairs
from alignment.data.config import DataConfig
from alignment.losses import kto_loss, orpo_loss
from alignment.losses.preference_table import LOSSES
from alignment.models.build import build_language_model
from tests.examples import labeled_example, pair_example, sides

pytest.importorskip("trl")
# Tokens of the prompt and of the two responses of each pair.
LENGTHS = [(3, 5, 7), (2, 6, 4), (4, 3, 3), (1, 8, 2), (5, 4, 6)]
VOCABULARY = 23
CONFIG = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip


def make_pairs() -> list[Example]:
    generator = torch.Generator().manual_seed(3)
    pairs = []
    for number, (prompt, chosen, rejected) in enumerate(LENGTHS):
        head = torch.randint(1, VOCABULARY, (prompt,), generator=generator).tolist()
        sides = [
            Example.single(head + torch.randint(1, VOCABULARY, (n,), generator=generator).tolist(),
                    [False] * prompt + [True] * n, str(number))
            for n in (chosen, rejected)
        ]  # fmt: skip
        pairs.append(pair_example(*sides, None, str(number)))
    return pairs


def make_models():
    """Policy and reference, both away from their initial weights."""
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = build_language_model(CONFIG).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
        models.append(model)
    return models


def padded(documents: list[Example]) -> dict[str, torch.Tensor]:
    """Documents as trl's collator lays them out."""
    width = max(len(document.ids) for document in documents)
    rows = {"input_ids": [], "attention_mask": [], "completion_mask": []}
    for document in documents:
        rest = width - len(document.ids)
        rows["input_ids"].append(document.ids + [0] * rest)
        rows["attention_mask"].append([1] * len(document.ids) + [0] * rest)
        rows["completion_mask"].append([int(counts) for counts in document.mask] + [0] * rest)
    return {name: torch.tensor(values) for name, values in rows.items()}


class TokenLogProbs(torch.nn.Module):
    """What trl's fused head gives: log-probabilities of the labels, 0 where there is none, and statistics of logits."""

    is_gradient_checkpointing = False

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, labels=None, **_):
        logits = self.model(input_ids, attention_mask=attention_mask).logits
        if labels is None:
            return SimpleNamespace(logits=logits)
        targets = labels[:, 1:].clamp(min=0)
        log_probs = logits[:, :-1].log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        log_probs = log_probs * (labels[:, 1:] != -100)
        none = torch.zeros_like(log_probs)
        return SimpleNamespace(log_probs=log_probs, entropy=none, mean_logits=none, is_top1=none.bool(), logits=logits)


def accelerator():
    same = lambda value: value  # noqa: E731
    return SimpleNamespace(
        device=torch.device("cpu"), gather=same, gather_for_metrics=same, unwrap_model=same,
        autocast=contextlib.nullcontext,
    )  # fmt: skip


def metrics():
    from collections import defaultdict

    return {mode: defaultdict(list) for mode in ("train", "eval")}


def trl_dpo(policy, reference, **settings):
    """Loss of trl's DPO trainer on the pairs."""
    from trl import DPOTrainer

    values = {
        "loss_types": ["sigmoid"], "loss_weights": [1.0], "beta": 0.1, "label_smoothing": 0.0, "ld_alpha": None,
        "precompute_ref_logps": False, "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5,
        "use_weighting": False, "aux_loss_enabled": False, "_total_train_tokens": 0, "_tp_size": 1, "_metrics": metrics(),
        "accelerator": accelerator(), "ref_model": TokenLogProbs(reference), "model": TokenLogProbs(policy),
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=0.05),
    }  # fmt: skip
    trainer = SimpleNamespace(**{**values, **settings})
    pairs = make_pairs()
    inputs = padded([sides(pair)[0] for pair in pairs] + [sides(pair)[1] for pair in pairs])
    return MethodType(DPOTrainer._compute_loss, trainer)(TokenLogProbs(policy), inputs, False)


def ours(policy, reference, given=None, **settings):
    """Our loss on the same pairs, in two micro-batches, each weighed as an update weighs it."""
    config = DPOConfig("p", DataConfig(train="t"), "o", **settings)
    loss_fn = dpo_loss_fn(policy, torch.no_grad()(reference), config)
    pairs, total = make_pairs(), 0.0
    for batch in with_positions(collate_pairs(pairs, 45), given or GlobalInputs()):
        total = total + (loss_fn(batch) if given is None else loss_fn(batch, given)).total
    return total / len(pairs)


def all_inputs(policy, reference) -> GlobalInputs:
    """What a loss takes of the whole batch."""
    from alignment.algorithms.dpo.responses import sequence_log_probs

    (batch,) = collate_pairs(make_pairs(), 10_000)
    with torch.no_grad():
        columns = [side for model in (policy, reference) for side in sequence_log_probs(model, batch.ragged).chunk(2)]
    tokens = sum(chosen for _, chosen, _ in LENGTHS) / len(LENGTHS)
    return GlobalInputs(pairs=torch.stack(columns, 1), mean_tokens=torch.tensor(tokens))


def compare(policy, one, other):
    """Values and gradients of two losses of one policy, within 1e-5."""
    assert_close(one, other, atol=1e-5, rtol=1e-5)
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    for a, b in zip(*(torch.autograd.grad(loss, parameters) for loss in (one, other)), strict=True):
        assert_close(a, b, atol=1e-5, rtol=1e-4)


SAME = ["sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero",
        "apo_down", "discopop", "aot", "aot_unpaired"]  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_a_model_and_a_batch_have_the_loss_and_gradients_of_trl(name):
    policy, reference = make_models()
    settings = {**LOSSES[name].defaults, "beta": 0.3}
    settings |= {"label_smoothing": 0.1} if "label_smoothing" in settings else {}
    theirs = trl_dpo(policy, reference, loss_types=[name], **{k: v for k, v in settings.items() if k != "tau"})
    if name in ("sigmoid", "sigmoid_norm"):
        # trl's sigmoid takes no label smoothing, which Mitchell's cDPO does: the two are equal without it
        settings["label_smoothing"] = 0.0
    given = all_inputs(policy, reference)
    compare(policy, ours(policy, reference, given, loss=name, **settings), theirs)


@pytest.mark.parametrize(
    ("divergence", "theirs"), [("forward_kl", "forward_kl"), ("js", "js_divergence"), ("alpha", "alpha_divergence")]
)
@pytest.mark.parametrize("name", ["sigmoid", "ipo", "hinge"])
def test_other_divergences_have_the_loss_and_gradients_of_trl(divergence, theirs, name):
    """trl's coefficient of the alpha-divergence is one minus the paper's (table 1), which is ours."""
    policy, reference = make_models()
    with torch.no_grad():  # forward_kl grows with e to the log-ratio: keep it within a few nats
        for parameter, start in zip(policy.parameters(), reference.parameters(), strict=True):
            parameter.copy_(start + 0.03 * torch.randn_like(start))
    options = {"f_divergence_type": theirs, "f_alpha_divergence_coef": 0.7, "beta": 0.3}
    wanted = trl_dpo(policy, reference, loss_types=[name], **options)
    alpha = {"f_alpha": 0.3} if divergence == "alpha" else {}
    compare(policy, ours(policy, reference, loss=name, f_divergence=divergence, beta=0.3, **alpha), wanted)


def test_several_losses_and_imitation_have_the_loss_and_gradients_of_trl():
    policy, reference = make_models()
    wanted = trl_dpo(
        policy, reference, loss_types=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 0.5], beta=0.3
    )
    losses = {"sigmoid": 0.8, "bco_pair": 0.2}
    compare(policy, ours(policy, reference, all_inputs(policy, reference), loss=losses, sft_coef=0.5, beta=0.3), wanted)


def concatenated(pairs):
    """A batch as trl's CPO and ORPO trainers take it: labels are -100 at the prompt."""
    batch = {}
    for number, side in enumerate(("chosen", "rejected")):
        rows = padded([sides(pair)[number] for pair in pairs])
        batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"] = rows["input_ids"], rows["attention_mask"]
        batch[f"{side}_labels"] = rows["input_ids"].masked_fill(rows["completion_mask"] == 0, -100)
    return batch


def trl_reference_free(trainer_class, policy, **settings):
    values = {
        "is_encoder_decoder": False, "padding_value": 0, "pad_token_id": 0, "aux_loss_enabled": False, "alpha": 0.0,
        "label_smoothing": 0.0, "accelerator": accelerator(),
    }  # fmt: skip
    trainer = SimpleNamespace(**{**values, **settings})
    for name in ("concatenated_forward", "cpo_loss", "odds_ratio_loss"):
        if hasattr(trainer_class, name):
            setattr(trainer, name, MethodType(getattr(trainer_class, name), trainer))
    trainer.concatenated_inputs = trainer_class.concatenated_inputs
    trainer.get_batch_logps = trainer_class.get_batch_logps
    model = lambda ids, attention_mask, **_: policy(ids, attention_mask=attention_mask)  # noqa: E731
    return MethodType(trainer_class.get_batch_loss_metrics, trainer)(model, concatenated(make_pairs()))[0]


def test_simpo_and_cpo_have_the_loss_and_gradients_of_trl():
    from trl.experimental.cpo import CPOTrainer

    policy, reference = make_models()
    wanted = trl_reference_free(CPOTrainer, policy, loss_type="simpo", beta=2.0, simpo_gamma=0.5, cpo_alpha=0.0)
    compare(policy, ours(policy, reference, loss="simpo", beta=2.0, gamma=0.5), wanted)
    given = all_inputs(policy, reference)
    wanted = trl_reference_free(CPOTrainer, policy, loss_type="sigmoid", beta=0.2, label_smoothing=0.1, cpo_alpha=0.7)
    compare(policy, ours(policy, reference, given, loss="cpo", beta=0.2, label_smoothing=0.1, sft_coef=0.7), wanted)


def test_orpo_has_the_odds_ratio_term_of_trl():
    """The paper's L_SFT is that of the chosen response; trl takes the mean over prompt and response."""
    from trl.experimental.orpo import ORPOTrainer

    policy, reference = make_models()
    given = all_inputs(policy, reference)
    theirs = trl_reference_free(ORPOTrainer, policy, beta=0.2)
    whole = [
        Example.single(p.documents[0], [False] + [True] * (len(p.documents[0]) - 1), p.row_id) for p in make_pairs()
    ]
    (text,) = collate_pairs([pair_example(row, row, None, row.row_id) for row in whole], 10_000)
    count = sum(len(row.ids) - 1 for row in whole)
    of_text = -policy(batch=text.ragged).log_probs[:count].sum() / count
    compare(policy, ours(policy, reference, loss="orpo", beta=0.2, sft_coef=0.0), theirs - of_text)
    full = ours(policy, reference, given, loss="orpo", beta=0.2)
    odds = ours(policy, reference, loss="orpo", beta=0.2, sft_coef=0.0)
    (batch,) = collate_pairs(make_pairs(), 10_000)
    responses = sum(chosen for _, chosen, _ in LENGTHS)
    compare(policy, full - odds, -policy(batch=batch.ragged).log_probs[:responses].sum() / responses)
    half = torch.tensor([0.5]).log()
    trainer = SimpleNamespace(beta=1.0, accelerator=accelerator())
    (term, *_) = MethodType(ORPOTrainer.odds_ratio_loss, trainer)(half, 2 * half)
    assert_close(orpo_loss(half, 2 * half), -term)


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
def test_labels_have_the_loss_and_gradients_of_trl(name):
    """trl takes the mismatched pairs of each device's micro-batch; over one batch both have the same ones."""
    from trl import KTOTrainer

    policy, reference = make_models()
    rows = [
        labeled_example(example, desirable, example.row_id)
        for pair in make_pairs() for example, desirable in ((sides(pair)[0], True), (sides(pair)[1], False))
    ][:7]  # fmt: skip
    from alignment.algorithms.dpo.global_inputs import mismatched_rows
    from alignment.algorithms.dpo.responses import sequence_log_probs

    mismatched = mismatched_rows(rows, 32, None)
    inputs = padded(rows) | {"label": torch.tensor([row.values["desirable"] for row in rows])}
    inputs |= {f"KL_{key}": value for key, value in padded(mismatched).items()}
    trainer = SimpleNamespace(
        accelerator=accelerator(), model=TokenLogProbs(policy), ref_model=TokenLogProbs(reference), beta=0.3,
        loss_type=name, calculate_KL=name == "kto", precompute_ref_logps=False, desirable_weight=1.2,
        undesirable_weight=0.7, aux_loss_enabled=False, _total_train_tokens=0, _tp_size=1, _metrics=metrics(),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
    )  # fmt: skip
    trainer._compute_kl_logps = MethodType(KTOTrainer._compute_kl_logps, trainer)
    theirs = MethodType(KTOTrainer._compute_loss, trainer)(TokenLogProbs(policy), inputs, False)
    (batch,) = collate_labeled(mismatched, 10_000)
    with torch.no_grad():
        ratios = sequence_log_probs(policy, batch.ragged) - sequence_log_probs(reference, batch.ragged)
    kl = ratios.mean().clamp(min=0)
    weights = {"desirable_weight": 1.2, "undesirable_weight": 0.7}
    config = DPOConfig("p", DataConfig(train="t"), "o", loss=name, beta=0.3, **weights)
    loss_fn = dpo_loss_fn(policy, torch.no_grad()(reference), config)
    total = sum(loss_fn(batch, GlobalInputs(kl=kl)).total for batch in collate_labeled(rows, 20))
    compare(policy, total / len(rows), theirs)


def test_kto_reference_point_is_never_negative_and_has_no_gradient():
    policy = torch.tensor([-3.0], requires_grad=True)
    cost = kto_loss(policy, torch.tensor([-3.0]), torch.tensor([True]), torch.tensor(0.0), beta=0.1)
    assert_close(torch.autograd.grad(cost.sum(), policy)[0], torch.tensor([-0.025]))  # -beta / 4
