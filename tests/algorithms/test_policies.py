"""What several algorithms start from: held-out means, losses over a model, notes and samples of a run, dropout."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from alignment import load_tokenizer
from alignment.adapters import LoRASpec
from alignment.algorithms import pretrain, reward, sft
from alignment.algorithms.dpo import dpo
from alignment.algorithms.ppo.setup import start_value_model
from alignment.algorithms.rollouts.metrics import sample_columns, texts_of
from alignment.algorithms.rollouts.rollout import Rollout
from alignment.algorithms.runs import read_split
from alignment.algorithms.sft import language_loss_fn
from alignment.data.config import DataConfig
from alignment.data.tokenize import PROMPT_CUT
from alignment.models.outputs import LanguageOutput
from alignment.ragged import Ragged
from alignment.training import LossSum, TrainingConfig, held_out_metrics


@pytest.mark.parametrize("training", [True, False])
def test_held_out_means_are_without_dropout_and_the_mode_stays(training):
    model, modes = torch.nn.Dropout().train(training), []
    engine = SimpleNamespace(
        model=model,
        backend=SimpleNamespace(unwrapped=model, autocast=nullcontext),
        process_group=SimpleNamespace(device="cpu"),
    )

    def loss_fn(batch):
        modes.append(model.training)
        total = torch.tensor(6.0 if batch.weight == 1 else 2.0)
        return LossSum(total, {"accuracy": torch.tensor(1.0)})

    batches = [Ragged.build([[1, 2]]), Ragged.build([[1, 2, 3, 4]])]  # one prediction and three
    assert held_out_metrics(engine, batches, loss_fn) == {"held_out_loss": 2.0, "held_out_accuracy": 0.5}
    assert modes == [False, False] and model.training == training


def test_the_balance_of_experts_counts_once_for_each_target():
    batch = Ragged.build([[1, 2, 3], [4, 5]])  # three targets
    output = LanguageOutput(log_probs=torch.tensor([-1.0, -2.0, -4.0]), balance=torch.tensor(0.5))
    result = language_loss_fn(lambda batch: output)(batch)
    assert result.total.item() == 7 + 3 * 0.5 and result.metrics["balance_loss"].item() == 1.5
    assert language_loss_fn(lambda batch: output._replace(balance=None))(batch).total.item() == 7


def test_what_is_cut_from_either_part_is_noted(tokenizer, tmp_path):
    row = '{"prompt": "Where is the spa, and when does it open on a Sunday?", "completion": " At nine."}\n'
    (tmp_path / "a.jsonl").write_text(row)
    (tmp_path / "b.jsonl").write_text(2 * row)
    notes = []
    data = DataConfig(str(tmp_path / "a.jsonl"), evaluation=str(tmp_path / "b.jsonl"), max_length=16, max_cut_share=1)
    config = SimpleNamespace(data=data, chat_template=None)
    train, held_out = read_split(config, "demonstrations", tokenizer, SimpleNamespace(note=notes.append))
    assert (len(train), len(held_out)) == (1, 2)
    assert any(note.startswith("train demonstrations: ") and f"cut 1: {PROMPT_CUT}" in note for note in notes)
    assert any(note.startswith("evaluation demonstrations: ") and f"cut 2: {PROMPT_CUT}" in note for note in notes)


def test_a_few_samples_are_kept_without_their_end_token(tokenizer):
    end, words = tokenizer.eos_token_id, tokenizer("the spa", add_special_tokens=False).input_ids
    frame = torch.zeros(3, len(words) + 1)
    rollout = Rollout(
        prompts=[[tokenizer.bos_token_id, *words]] * 3, responses=[[*words, end], words, words], numbers=[0, 1, 2],
        mask=frame.bool(), log_probs=frame, sampled_log_probs=frame, reference_log_probs=frame, values=frame,
        scores=torch.tensor([0.5, -1.0, 9.0]), ended=torch.tensor([True, False, False]),
    )  # fmt: skip
    assert texts_of(rollout, tokenizer, 2) == (["the spa"] * 2, ["the spa"] * 2)
    assert sample_columns(rollout)["score"] == [0.5, -1.0]


@pytest.mark.parametrize(
    ("kind", "module", "wanted"),
    [("pretrain", pretrain, True), ("sft", sft, True), ("reward", reward, True), ("dpo", dpo, False)],
)
def test_dropout_is_on_where_nothing_is_compared(kind, module, wanted, checkpoints, ran, tmp_path, monkeypatch):
    """DPO compares the policy with itself at the start, so it trains without."""
    modes = []

    def fit(engine, *rest, **options):
        modes.append(engine.model.training)
        (tmp_path / "metrics.jsonl").touch()  # DPO reads what was logged

    monkeypatch.setattr(module, "fit", fit)
    ran(kind, checkpoints["gpt2"], tmp_path, training=TrainingConfig(batch_size=8, max_steps=1))
    assert modes == [wanted]


def test_centering_reaches_the_loss_of_a_run(checkpoints, ran, tmp_path, read_metrics):
    training, losses = TrainingConfig(batch_size=8, max_steps=1), []
    for coef in (0.0, 100.0):
        output = tmp_path / str(coef)
        ran("reward", checkpoints["llama"], output, training=training, center_coef=coef)
        losses.append(read_metrics(output)[0]["loss"])
    assert losses[1] > losses[0] + 0.01


def test_new_weights_follow_the_seed(checkpoints, make_stage, tmp_path, monkeypatch):
    heads = []
    for seed in (0, 0, 1):
        training = TrainingConfig(batch_size=8, max_steps=1, seed=seed)
        run, config = make_stage("reward", checkpoints["llama"], tmp_path / str(len(heads)), training=training)
        with monkeypatch.context() as patch:
            keep = lambda engine, *rest, **options: heads.append(engine.backend.unwrapped.head.weight.detach().clone())  # noqa: E731
            patch.setattr(reward, "fit", keep)
            run(config)
    assert torch.equal(heads[0], heads[1]) and not torch.allclose(heads[0], heads[2])


def test_a_critic_from_the_policy_trains_an_adapter_and_its_head(stage, make_stage, tmp_path):
    _, config = make_stage(
        "ppo", str(stage("sft") / "model"), tmp_path, reward_model="-", value_model="policy", adapter=LoRASpec(rank=2)
    )
    value_model = start_value_model(config, load_tokenizer(config.policy)).model
    trained = {name for name, parameter in value_model.named_parameters() if parameter.requires_grad}
    assert any(".lora_" in name for name in trained) and any(name.startswith("head.") for name in trained)
    assert all(".lora_" in name or name.startswith("head.") for name in trained)
    assert value_model.head.weight.abs().max() == 0


def test_a_models_own_dropout_is_said_to_be_off(write_checkpoint, stage, ran, tmp_path):
    few = TrainingConfig(batch_size=4, max_steps=1)
    rates = {"resid_pdrop": 0.1, "attn_pdrop": 0.0, "summary_first_dropout": 0.1}
    policy = write_checkpoint(tmp_path / "policy", "gpt2", **rates)
    more = {"dpo": {}, "ppo": {"reward_model": str(stage("reward gpt2") / "model"), "epochs": 1, "minibatches": 1}}
    for kind in more:
        ran(kind, policy, tmp_path / kind, training=few, **more[kind])
        notes = json.loads((tmp_path / kind / "lineage.json").read_text())["notes"]
        [note] = [note for note in notes if note.startswith("dropout: off")]
        assert note.endswith("has resid_pdrop=0.1")
