"""The invariants that catch most of what goes wrong in RLHF code, each on the code that trains.

I8 is in learning/test_bandit.py, I11 in parity/test_parity.py, I15 in algorithms/test_ppo_iteration.py; what needs several
processes or a kill is in distributed/ and training/.
"""

import copy
import math
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.testing import assert_close

from alignment import generate, load_model, load_reward_model
from alignment.adapters import LoRASpec, PrefixSpec, attach, load_adapter, merge_adapter, save_adapter
from alignment.algorithms import dpo, reward
from alignment.algorithms.policies import load_policy, load_value_model, reference_of
from alignment.algorithms.ppo import ppo
from alignment.algorithms.ppo.advantages import add_advantages
from alignment.algorithms.ppo.loss_functions import rollout_batches
from alignment.algorithms.ppo.metrics import explained_variance
from alignment.algorithms.ppo.setup import build_state, read_data
from alignment.algorithms.ppo.state import ScoreNormalizer
from alignment.algorithms.rollouts.metrics import response_means
from alignment.algorithms.rollouts.rollout import Rollout, ragged_of
from alignment.algorithms.sft import language_loss_fn
from alignment.data.batches import collate, collate_pairs
from alignment.data.config import DataConfig
from alignment.data.prepare import prepare
from alignment.data.stream import Stream
from alignment.data.text.chat import end_token_id
from alignment.errors import UserError
from alignment.loading import Checkpoint
from alignment.models import transformer
from alignment.models.build import build_language_model, build_scalar_model
from alignment.models.huggingface.checkpoint import load_language_model, load_scalar_model, save_model
from alignment.ragged import Ragged
from alignment.training import Engine, NonFiniteError, OptimConfig, Run, Term, TrainingConfig
from tests.conftest import read_lines, write_lines
from tests.examples import padded

FAMILIES = ("gpt2", "llama")
BY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
LONG_WAY_OFF = 1e6
# Adam whose eps dwarfs every gradient divides by a constant: plain gradient descent with step 1.
PLAIN_DESCENT = OptimConfig(
    learning_rate=LONG_WAY_OFF, betas=(0.0, 0.0), eps=LONG_WAY_OFF, schedule="constant", max_grad_norm=0
)
ADAPTERS = {"LoRA": LoRASpec(rank=4, alpha=16.0), "prefix": PrefixSpec(tokens=3)}


def examples_of(kind, world, tokenizer, count=8):
    file = {"demonstrations": "demonstrations", "comparisons": "comparisons", "prompts": "prompts", "text": "pretrain"}[
        kind
    ]
    examples, _ = prepare(DataConfig(train=world[file], max_length=256), kind, tokenizer)
    return examples[:count]


def write_jsonl(path, rows):
    write_lines(Path(path), rows)
    return str(path)


def random_ids(lengths, vocabulary=61, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


# --- I1, I2: what the models are shown ------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["", "</s>"], ids=["plain", "ending in the end token"])
@pytest.mark.parametrize("pad", ["own", "end token"])
def test_I1_supervised_text_is_the_response_and_one_end_token(world, tokenizer, tmp_path, end, pad):
    """Proves: the targets of SFT, reward model and DPO, decoded, are each response and exactly one end token, also where
    the row brings its own end token, and where padding is the end token (H01, H02, H04)."""
    tokenizer = copy.deepcopy(tokenizer)
    if pad == "end token":
        tokenizer.pad_token = tokenizer.eos_token
    rows = read_lines(world["demonstrations"])[:6]
    path = write_jsonl(tmp_path / "rows.jsonl", [row | {"completion": row["completion"] + end} for row in rows])
    examples, _ = prepare(DataConfig(train=path), "demonstrations", tokenizer)
    wanted = [row["completion"] for row in rows]
    assert sorted(supervised(collate(examples, 300), tokenizer)) == sorted(wanted)

    pairs, kept = examples_of("comparisons", world, tokenizer), read_lines(world["comparisons"])[:8]
    wanted = [row[side] for row in kept for side in ("chosen", "rejected")]
    assert sorted(supervised([batch.ragged for batch in collate_pairs(pairs, 600)], tokenizer)) == sorted(wanted)


def supervised(batches, tokenizer):
    """Text of each document's targets, the one end token at its end taken off."""
    texts = []
    for batch in batches:
        for row in range(len(batch.lengths)):
            ids = batch.tokens[batch.target_index[batch.target_rows == row]].tolist()
            assert ids.count(end_token_id(tokenizer)) == 1 and ids[-1] == end_token_id(tokenizer)
            texts.append(tokenizer.decode(ids[:-1]))
    return texts


def test_I1_a_rollout_trains_on_what_was_drawn_and_nothing_else():
    """Proves: PPO's targets are the sampled tokens, the end token among them, and never the prompt's (H01, H34)."""
    batch = ragged_of([[1, 5, 6], [1]], [[7, 2], [8, 9, 2]], [0, 1])
    assert batch.tokens[batch.target_index].tolist() == [7, 2, 8, 9, 2]


@pytest.mark.parametrize("form", ["text", "messages"])
def test_I2_every_document_of_every_stage_has_one_BOS(form, world, checkpoints, ran, tokenizer, tmp_path, monkeypatch):
    """Proves: pretraining, SFT, reward model, DPO, PPO, generation and scoring show the models documents that begin with
    the one BOS there is, also where the tokenizer adds it and the chat template writes it too (H03)."""
    policy = checkpoints["llama"]
    if form == "messages":
        world, policy = as_messages(world, tmp_path), with_template(policy, tokenizer, tmp_path / "policy")
    seen = []
    build = Ragged.build.__func__
    spy = lambda cls, documents, *rest, **named: (seen.extend(documents), build(cls, documents, *rest, **named))[1]  # noqa: E731
    monkeypatch.setattr(Ragged, "build", classmethod(spy))

    one_step = TrainingConfig(batch_size=4, max_steps=1)
    kinds = {
        "pretrain": "pretrain",
        "sft": "demonstrations",
        "reward": "comparisons",
        "dpo": "comparisons",
        "ppo": "prompts",
    }
    for kind, rows in kinds.items():
        more = {"reward_model": str(tmp_path / "reward/model"), "minibatches": 1, "epochs": 1} if kind == "ppo" else {}
        more |= {"max_new_tokens": 1} if kind == "ppo" else {}  # an untrained policy may well draw a BOS
        data = DataConfig(train=world[rows], max_length=256)
        before = len(seen)
        ran(kind, policy, tmp_path / kind, data=data, training=one_step, **more)
        assert len(seen) >= before + 4
    prompt = read_lines(world["prompts"])[0]["prompt"]
    judge = load_reward_model(str(tmp_path / "reward/model"))  # scores its canaries
    before = len(seen)
    generate(load_model(policy), judge.tokenizer, [prompt], max_new_tokens=2)
    judge.score([(prompt, "Yes."), "A whole text."])
    assert len(seen) == before + 3
    bos = tokenizer.bos_token_id
    assert [ids for ids in seen if list(ids).count(bos) != 1 or ids[0] != bos] == []


def as_messages(world, folder):
    """The world's files with prompts and responses as chat messages."""
    user, assistant = (
        (lambda text: [{"role": "user", "content": text}]),
        (lambda text: [{"role": "assistant", "content": text}]),
    )
    change = {
        "demonstrations": lambda r: {"messages": user(r["prompt"]) + assistant(r["completion"])},
        "comparisons": lambda r: {"prompt": user(r["prompt"]), **{k: assistant(r[k]) for k in ("chosen", "rejected")}},
        "prompts": lambda r: {"prompt": user(r["prompt"])},
        "pretrain": lambda r: r,
    }
    return {
        name: write_jsonl(folder / f"{name}.jsonl", map(to, read_lines(world[name])[:8])) for name, to in change.items()
    }


def with_template(policy, tokenizer, directory):
    """The checkpoint, its tokenizer with a template that writes the BOS itself."""
    from alignment.data.tokenizers.tokenizer import save_tokenizer

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    save_model(load_language_model(policy), directory)
    save_tokenizer(tokenizer, directory)
    return str(directory)


# --- I3: how a batch is cut -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rollout(checkpoints) -> Rollout:
    """Eight made-up responses of 1 to 8 tokens, everything about them known."""
    generator = torch.Generator().manual_seed(5)
    lengths = list(range(1, 9))
    mask = torch.arange(8) < torch.tensor(lengths)[:, None]
    frame = lambda: torch.where(mask, torch.randn(8, 8, generator=generator), 0.0)  # noqa: E731
    made = Rollout(
        prompts=random_ids([3, 9, 1, 5, 4, 2, 8, 6]), responses=random_ids(lengths, seed=1), numbers=lengths, mask=mask,
        log_probs=frame() - 5, sampled_log_probs=frame() - 5,
        reference_log_probs=frame() - 5, values=frame(), scores=torch.randn(8, generator=generator),
        ended=torch.tensor([True, False] * 4),
    )  # fmt: skip
    return add_advantages(made, **SHAPING)


PPO_SETTINGS = ppo.PPOConfig(
    policy="-", reward_model="-", data=DataConfig(train="-"), output="", temperature=0.8, clip_range=0.2,
    value_clip_range=0.2, missing_end_penalty=1.0, gamma=1.0, gae_lambda=0.95,
)  # fmt: skip
SHAPING = {
    "config": PPO_SETTINGS, "normalizer": ScoreNormalizer(), "kl_coef": 0.1, "reduce": lambda x: x,
}  # fmt: skip


def language_case(model, world, tokenizer, rollout, cut):
    examples = examples_of("demonstrations", world, tokenizer)
    return language_loss_fn(model), cut_rows(examples, cut, lambda rows: collate(rows, 10**6))


def pair_case(model, world, tokenizer, rollout, cut, loss_fn):
    return loss_fn(model), cut_rows(
        examples_of("comparisons", world, tokenizer), cut, lambda rows: collate_pairs(rows, 10**6)
    )


def reward_case(*arguments):
    return pair_case(*arguments, lambda model: reward.objective_loss_fn(model, "bradley_terry", center_coef=0.01))


def dpo_case(*arguments):
    def loss_fn(model):
        reference = torch.no_grad()(copy.deepcopy(model))
        with torch.no_grad():
            model.head.weight += 0.05 * torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(2))
        return dpo.dpo_loss_fn(model, reference, dpo.DPOConfig(policy="", data=DataConfig(train="-"), output=""))

    return pair_case(*arguments, loss_fn)


def policy_case(model, world, tokenizer, rollout, cut):
    return ppo.policy_loss_fn(model, PPO_SETTINGS, []), cut_rollout(rollout, cut)


def value_case(model, world, tokenizer, rollout, cut):
    return ppo.value_loss_fn(model, PPO_SETTINGS), cut_rollout(rollout, cut)


def cut_rollout(rollout, cut):
    return cut_rows(list(range(8)), cut, lambda rows: rollout_batches(rollout, rows, 10**6))


def cut_rows(rows, cut, collate_rows):
    """Micro-batches of so many rows each."""
    rows = iter(rows)
    return [batch for count in cut for batch in collate_rows(list(islice(rows, count)))]


CASES = {
    "SFT": (build_language_model, language_case), "reward model": (build_scalar_model, reward_case),
    "DPO": (build_language_model, dpo_case), "PPO policy": (build_language_model, policy_case),
    "PPO value model": (build_scalar_model, value_case),
}  # fmt: skip
BY_CASE = pytest.mark.parametrize("case", CASES)


def fresh(case, family, vocabulary=384):
    """A model for the case, always the same."""
    torch.manual_seed(0)
    sizes = {
        "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 256},
        "llama": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
                  "max_position_embeddings": 256},
    }  # fmt: skip
    return CASES[case][0]({"model_type": family, "vocab_size": vocabulary, "pad_token_id": 0, **sizes[family]})


@BY_CASE
def test_I3_an_update_does_not_depend_on_how_the_batch_is_cut(case, world, tokenizer, rollout):
    """Proves: one step of gradient descent and every metric are the same for 8 x 1, 1 x 8 and 3 + 3 + 2 rows per
    micro-batch, in each stage's own loss (H10, H12)."""

    def update(cut):
        model = fresh(case, "llama")
        loss_fn, batches = CASES[case][1](model, world, tokenizer, rollout, cut)
        assert len(batches) == len(cut)
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        metrics = Engine(model, PLAIN_DESCENT, TrainingConfig(), total_steps=1).update(Term(batches, loss_fn))
        return torch.cat([p.detach().flatten() for p in model.parameters()]) - before, metrics

    whole, metrics = update([8])
    assert whole.norm() > 1e-3
    for cut in ([1] * 8, [3, 3, 2]):
        step, others = update(cut)
        assert (step - whole).norm() <= 1e-5 * whole.norm()
        assert others == pytest.approx(metrics, rel=1e-4, abs=1e-6)


# --- I4: what must not count ----------------------------------------------------------------------------------------

JUNK = pytest.mark.parametrize("junk", [1e9, float("nan")])


@JUNK
@BY_CASE
def test_I4_what_stands_at_uncounted_tokens_changes_nothing(case, junk, world, tokenizer, rollout, monkeypatch):
    """Proves: overwriting every last hidden state that no target, score or value is read from changes no loss, no metric
    and no gradient (H12, H13, H23, H35)."""

    monkeypatch.setattr(transformer, "selects_tokens", lambda block: False)  # else these states are not even computed

    def update(junk):
        model = fresh(case, "llama")
        loss_fn, batches = CASES[case][1](model, world, tokenizer, rollout, [8])
        if junk is not None:
            spoil(model, read_places(case, batches[0]), junk)
        metrics = Engine(model, PLAIN_DESCENT, TrainingConfig(), total_steps=1).update(Term(batches, loss_fn))
        return metrics, model.state_dict()

    clean, weights = update(None)
    metrics, spoiled = update(junk)
    assert metrics == clean
    assert_close(spoiled, weights, rtol=0, atol=0)


def read_places(case, batch):
    """Indices of the tokens whose state may count."""
    ragged = getattr(batch, "ragged", batch)
    return ragged.last if case == "reward model" else ragged.target_index - 1


def spoil(model, places, junk):
    """Put `junk` everywhere but at `places` of the last states, of which the head reads a choice."""
    counts = lambda x: torch.zeros(len(x), dtype=torch.bool).index_fill(0, places, True)  # noqa: E731
    model.trunk.norm.register_forward_hook(lambda *call: torch.where(counts(call[2])[:, None], call[2], junk))


@JUNK
def test_I4_what_stands_after_a_response_changes_nothing(rollout, junk):
    """Proves: log-probabilities and values in a rollout's frames after the end of a response reach neither rewards,
    advantages, returns, metrics nor batches (H28, H30, H35)."""
    names = ("log_probs", "reference_log_probs", "values")
    wider = {name: torch.where(rollout.mask, getattr(rollout, name), junk) for name in names}
    wider = {name: F.pad(frame, (0, 3), value=junk) for name, frame in wider.items()}
    spoiled = add_advantages(replace(rollout, mask=F.pad(rollout.mask, (0, 3)), **wider), **SHAPING)
    for name in ("rewards", "advantages", "returns"):
        assert_close(getattr(spoiled, name), F.pad(getattr(rollout, name), (0, 3)), rtol=0, atol=1e-6)
    add = lambda x: x  # noqa: E731
    assert response_means(spoiled, add) == pytest.approx(response_means(rollout, add), abs=1e-6)
    assert explained_variance(spoiled, add) == pytest.approx(explained_variance(rollout, add), abs=1e-6)
    for one, other in zip(rollout_batches(spoiled, range(8), 20), rollout_batches(rollout, range(8), 20), strict=True):
        for name in ("log_probs", "values", "advantages", "returns"):
            assert_close(getattr(one, name), getattr(other, name), rtol=0, atol=1e-6)


# --- I5: who a row stands beside ------------------------------------------------------------------------------------


@BY_FAMILY
def test_I5_a_row_does_not_depend_on_padding_or_company(family):
    """Proves: logits, log-probabilities and scores of a document are the same alone, padded left or right by any length,
    packed with others in any order (H08, H18, H23, H33)."""
    language, scalar = fresh("SFT", family, 61).eval(), fresh("reward model", family, 61).eval()
    torch.nn.init.normal_(scalar.head.weight)
    documents = random_ids([7, 12, 1, 30])
    with torch.no_grad():
        alone = [language(torch.tensor([ids])).logits[0] for ids in documents]
        scores = [scalar(torch.tensor([ids])).logits[0] for ids in documents]
        for side in ("left", "right"):
            for extra in (0, 11):
                ids, attention = padded(documents, side, extra)
                logits, values = language(ids, attention).logits, scalar(ids, attention).logits
                for row, (one, score) in enumerate(zip(alone, scores, strict=True)):
                    assert_close(logits[row][attention[row]], one, atol=1e-5, rtol=0)
                    assert_close(values[row], score, atol=1e-5, rtol=0)
        for order in ([3, 0, 2, 1], [1, 2]):
            batch = Ragged.build([documents[i] for i in order])
            log_probs, values = language(batch=batch).log_probs, scalar(batch=batch).values[batch.last]
            for row, i in enumerate(order):
                wanted = alone[i][:-1].log_softmax(-1)[range(len(documents[i]) - 1), documents[i][1:]]
                assert_close(log_probs[batch.target_rows == row], wanted, atol=1e-5, rtol=0)
                assert_close(values[row], scores[i][0], atol=1e-5, rtol=0)


# --- I6, I7: where training starts ----------------------------------------------------------------------------------


FIRST_RATIO = {
    "cool": {"temperature": 0.7},
    "hot LoRA": {"temperature": 1.3, "adapter": LoRASpec(rank=2)},
    "top-p": {"temperature": 0.7, "top_p": 0.8},
    "prefix": {"temperature": 0.7, "adapter": PrefixSpec(tokens=3)},
    "one behind": {"temperature": 1.3, "rollouts_behind": 1},
    "LoRA one behind, top-k and min-p": {"adapter": LoRASpec(rank=2), "rollouts_behind": 1, "top_k": 50, "min_p": 0.05},
    "few slots, several responses": {"micro_rollout_batch_size": 3, "responses_per_prompt": 2, "advantages": "rloo"},
}


@pytest.mark.parametrize("name", FIRST_RATIO)
def test_I6_the_first_ratio_is_one(name, write_checkpoint, stage, make_stage, tmp_path, read_metrics):
    """Proves: in the first minibatch of every iteration the policy is the one whose log-probabilities are the ratio's
    denominator, with dropout in the model's config, a temperature other than 1, filters, adapters, samples of older weights
    and responses that enter as others end (H31, H33)."""
    settings = FIRST_RATIO[name]
    changes = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    policy = write_checkpoint(tmp_path / "policy", "gpt2", **changes)
    model, ids = load_language_model(policy), torch.arange(40)[None]
    assert not torch.equal(model.train()(ids).logits, model.eval()(ids).logits)  # the dropout is there, and it matters
    run, config = make_stage(
        "ppo",
        policy,
        tmp_path / "ppo",
        reward_model=str(stage("reward") / "model"),
        epochs=1,
        minibatches=1,
        **settings,
    )
    run(config)
    lines = read_metrics(tmp_path / "ppo")
    for line in lines:
        assert line["first_ratio_error"] <= 1e-5
        assert line["clip_fraction"] == 0 and line["approx_kl"] <= 1e-9
        assert (line["sampling_error"] <= 1e-4) is not config.samples_differ or line["step"] == 1
    if name != "prefix":  # a new prefix is no zero: the policy starts beside its reference
        assert abs(lines[0]["kl"]) <= 1e-4


STARTS = {"full": ("sft", None), "LoRA on LoRA": ("sft lora", ADAPTERS["LoRA"]), "prefix goes on": ("sft prefix", None)}


@pytest.mark.parametrize("start", STARTS)
def test_I7_the_first_dpo_loss_is_log_two(start, stage, ran, tmp_path, read_metrics):
    """Proves: at its first update the policy is its own reference, so that loss = ln 2 and both rewards are 0; a LoRA on
    an SFT adapter has the SFT policy as its reference, not the base under it (H39, H40)."""
    parent, adapter = STARTS[start]
    training = TrainingConfig(batch_size=8, max_steps=2)
    optim = OptimConfig(learning_rate=3e-2)
    ran("dpo", str(stage(parent) / "model"), tmp_path, adapter=adapter, training=training, optim=optim)
    first, second = read_metrics(tmp_path)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(first["chosen_reward"]) <= 1e-5 and abs(first["rejected_reward"]) <= 1e-5
    assert abs(second["chosen_reward"]) > 1e-4  # and then it moves away from it


def test_I7_the_base_under_an_sft_adapter_would_be_the_wrong_reference(stage, checkpoints, ran, tmp_path, read_metrics):
    """Proves: the test above can tell the two references apart; one that is named explicitly is the one used (H40)."""
    training = TrainingConfig(batch_size=8, max_steps=1)
    ran(
        "dpo",
        str(stage("sft lora") / "model"),
        tmp_path,
        adapter=ADAPTERS["LoRA"],
        reference=checkpoints["llama"],
        training=training,
    )
    assert abs(read_metrics(tmp_path)[0]["loss"] - math.log(2)) > 1e-3


@BY_FAMILY
def test_I7_the_reference_stays_where_it_was(family, stage, world, tokenizer, tmp_path):
    """Proves: ten updates later the reference's log-probabilities are the same bit for bit, for a frozen copy and for
    the policy with its adapter off (H40)."""
    start = str(stage("sft" if family == "llama" else "sft gpt2") / "model")
    batch = collate_pairs(examples_of("comparisons", world, tokenizer, 4), 10**6)[0]
    for adapter in (None, LoRASpec(rank=2, dropout=0.2)):
        policy = load_policy(Checkpoint(start), adapter, tokenizer, str(tmp_path))
        engine = Engine(policy.model.eval(), OptimConfig(learning_rate=1e-2), TrainingConfig(), total_steps=10)
        reference = reference_of(policy, None, engine)
        before = reference(batch=batch.ragged).log_probs
        loss_fn = dpo.dpo_loss_fn(
            engine.model, reference, dpo.DPOConfig(policy="", data=DataConfig(train="-"), output="")
        )
        for _ in range(10):
            engine.update(Term([batch], loss_fn))
        assert torch.equal(reference(batch=batch.ragged).log_probs, before)
        with torch.no_grad():
            assert not torch.allclose(engine.model(batch=batch.ragged).log_probs, before, atol=1e-3)


# --- I9: what trains ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True], ids=["", "gradient checkpointing"])
@pytest.mark.parametrize("adapter", [None, *ADAPTERS])
@BY_FAMILY
@pytest.mark.parametrize("kind", ["SFT", "reward model"])
def test_I9_what_should_train_changes_and_the_rest_stays(
    kind, family, adapter, recompute, checkpoints, world, tokenizer, tmp_path
):
    """Proves: after two updates (the first cannot move a LoRA's A, its B being 0) every trainable tensor has changed, and
    every frozen one is the same bit for bit; with an adapter exactly adapter and score head train (H20, H22)."""
    loader = load_policy if kind == "SFT" else partial(load_value_model, head="normal")
    model = loader(Checkpoint(checkpoints[family]), ADAPTERS.get(adapter or ""), tokenizer, str(tmp_path)).model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = Engine(
        model.train(), OptimConfig(learning_rate=1e-2), TrainingConfig(gradient_checkpointing=recompute), total_steps=9
    )
    loss_fn, batches = CASES[kind][1](engine.model, world, tokenizer, None, [8])
    for _ in range(2):
        engine.update(Term(batches, loss_fn))
    assert engine.untrained == []
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    own = {name for name in before if ".lora_" in name or name.startswith("prefix.")}
    head = {"head.weight"} if kind == "reward model" else set()
    assert changed == (own | head if adapter else set(before))


@pytest.mark.parametrize("adapter", [None, *ADAPTERS])
def test_I9_ppo_trains_policy_and_critic_and_nothing_else(adapter, stage, make_stage, tmp_path):
    """Proves: an iteration of PPO changes all that should change in policy and value model, and neither the reference nor the
    reward model (H20, H22)."""
    _, config = make_stage(
        "ppo", str(stage("sft") / "model"), tmp_path, reward_model=str(stage("reward") / "model"),
        adapter=ADAPTERS.get(adapter or ""),
    )  # fmt: skip
    with Run(tmp_path, {}, stage="ppo") as directory:
        data = read_data(config, directory)
        state = build_state(config, data)
        prompts = data.prompts.rows_at(0)
        batch = Ragged.build([prompt.ids for prompt in prompts])
        judged = (prompts[:2], [[1, 2, 3]] * 2, [False] * 2)
        frozen = (state.reference(batch=batch).log_probs, state.score(*judged).total)
        engines = (state.policy, state.value)
        before = [
            {name: value.clone() for name, value in engine.backend.unwrapped.state_dict().items()} for engine in engines
        ]
        ppo.iterate(state, config, prompts, 0)
    for engine, old in zip(engines, before, strict=True):
        wanted = {name for name in old if not adapter or ".lora_" in name or name.startswith("prefix.")}
        head = {"head.weight"} if engine is state.value else set()
        new = engine.backend.unwrapped.state_dict()
        assert {name for name, value in new.items() if not torch.equal(value, old[name])} == wanted | head
    assert torch.equal(state.reference(batch=batch).log_probs, frozen[0])
    assert torch.equal(state.score(*judged).total, frozen[1])


# --- I10: in and out of files ----------------------------------------------------------------------------------


@BY_FAMILY
@pytest.mark.parametrize("kind", ["policy", "reward model"])
@pytest.mark.parametrize("form", ["base", "LoRA", "prefix", "merged"])
def test_I10_saved_and_loaded_again_gives_the_same_bits(form, kind, family, checkpoints, tmp_path):
    """Proves: logits and scores survive save and load bit for bit, for a whole model, an adapter, an adapter with a score
    head, and a merged adapter, GPT-2's fused matrices included (H21, H24)."""
    scalar = kind == "reward model"
    load = partial(load_scalar_model, new_head="normal") if scalar else load_language_model
    model = load(checkpoints[family])
    if form != "base":
        attach(model, ADAPTERS["LoRA" if form == "merged" else form])
        disturb(model)
    model = merge_adapter(model) if form == "merged" else model
    if form in ("base", "merged"):
        save_model(model, tmp_path)
        again = (load_scalar_model if scalar else load_language_model)(tmp_path)
    else:
        save_adapter(model, tmp_path, base=checkpoints[family])
        again = load_adapter(
            (partial(load_scalar_model, new_head="zero") if scalar else load)(checkpoints[family]), tmp_path
        )
    ids = torch.tensor(random_ids([23]))
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, again.eval()(ids).logits)


def disturb(model, seed=0):
    """Trained weights away from their initial zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)


# --- I14: what is not a number --------------------------------------------------------------------------------------


def test_I14_a_nan_row_ends_sft_before_it_reaches_the_weights(
    world, tokenizer, write_checkpoint, make_stage, tmp_path, read_metrics
):
    """Proves: the run ends in an error that names the row; the newest checkpoint and the log are from before it (H17)."""
    policy = write_checkpoint(tmp_path / "policy", "gpt2", tie_word_embeddings=False)
    poison = tokenizer.convert_tokens_to_ids("#")  # a byte that the world never writes
    model = load_language_model(policy)
    with torch.no_grad():
        model.trunk.embed.weight[poison] = 3e38  # finite, and LayerNorm's sum over it is not
    save_model(model, policy)
    rows = read_lines(world["demonstrations"])[:6]
    [place] = Stream(rows, batch_size=1, seed=0).positions_at(3)
    rows[place]["prompt"] = "#" + rows[place]["prompt"]
    data = DataConfig(train=write_jsonl(tmp_path / "rows.jsonl", rows))
    training = TrainingConfig(batch_size=1, save_every_steps=1)
    run, config = make_stage("sft", policy, tmp_path / "sft", data=data, training=training)
    with pytest.raises(NonFiniteError, match=rf"update 4 .*rows\.jsonl:{place + 1}"):
        run(config)
    lines = read_metrics(tmp_path / "sft")
    assert len(lines) == 3 and all(math.isfinite(line["loss"]) for line in lines)
    newest = max((tmp_path / "sft/checkpoints").glob("step-*"))
    assert newest.name == "step-000003"
    weights = load_file(next(newest.rglob("model.safetensors")))
    assert len(weights) > 20 and all(value.isfinite().all() for value in weights.values())
    assert not (tmp_path / "sft/model").exists()


def test_I14_a_nan_score_ends_ppo_before_it_reaches_the_weights(stage, make_stage, tmp_path, monkeypatch):
    """Proves: a reward model that gives NaN ends PPO with policy and value model untouched, bit for bit (H17)."""
    held = {}
    iterate = ppo.iterate

    def watched(state, config, prompts, step):
        engines = {"policy": state.policy, "value": state.value}
        held.update(
            {
                name: (e, {k: v.clone() for k, v in e.backend.unwrapped.state_dict().items()})
                for name, e in engines.items()
            }
        )
        [judge] = [role.model for role in state.roles if role.name == "reward model"]
        torch.nn.init.constant_(list(judge.parameters())[-1], math.nan)
        return iterate(state, config, prompts, step)

    monkeypatch.setattr(ppo, "iterate", watched)
    run, config = make_stage("ppo", str(stage("sft") / "model"), tmp_path, reward_model=str(stage("reward") / "model"))
    with pytest.raises(UserError, match=r"reward model .* gives nan .*prompts\.jsonl:\d"):
        run(config)
    for engine, before in held.values():
        assert_close(engine.backend.unwrapped.state_dict(), before, rtol=0, atol=0)
    assert not (tmp_path / "model").exists()
