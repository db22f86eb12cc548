"""Samples by vLLM, against a stand-in for its module with the signatures that are used: the real one needs a GPU.

The stand-in samples with our engine and with weights a little off those it was given, as vLLM's rounding is.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from alignment.adapters import LoRASpec, PrefixSpec
from alignment.algorithms.online_dpo.samples import sample_and_judge
from alignment.algorithms.online_dpo.setup import build_online_state, read_online_data
from alignment.algorithms.ppo import PPOConfig, iterate, setup, vllm_sampler
from alignment.algorithms.ppo.evaluation import judge_held_out
from alignment.algorithms.ppo.held_out_config import HeldOutConfig
from alignment.algorithms.ppo.rollout import collect
from alignment.algorithms.ppo.setup import build_state, read_data
from alignment.algorithms.ppo.vllm_config import VLLMConfig
from alignment.algorithms.ppo.vllm_sampler import VLLMSampler, as_responses, refuse_untied, row_seed
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.generation import SamplingConfig, decode_responses
from alignment.loading import load_model
from alignment.models.huggingface.checkpoint import hf_locations, named_as_saved
from alignment.models.huggingface.weight_map import from_hf
from alignment.models.weights_config import WeightsConfig
from alignment.rewards.specs import LengthSpec, RewardSpec
from alignment.training import OptimConfig, Run, TrainingConfig

PARAMS = {
    "n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_tokens", "max_tokens", "seed",
    "stop_token_ids", "ignore_eos", "logprobs", "detokenize",
}  # fmt: skip


class FakeModel(nn.Module):
    """A model of vLLM: takes weights by their names in a Hugging Face file."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def load_weights(self, weights):
        given = dict(weights)
        locations = {name: at for name, at in hf_locations(self.inner).items() if at.name in given}
        self.inner.load_state_dict(from_hf(given, locations), strict=False)
        return {f"inner.{name}" for name in locations}


class FakeLLM:
    """vLLM's engine: what it was started with, and all calls in their order."""

    started: ClassVar["list[FakeLLM]"] = []

    def __init__(self, model, **settings):
        self.settings, self.calls, self.noise = settings, [], 0.03
        self.model = FakeModel(load_model(model))
        with torch.no_grad():  # until it gets weights, it has wrong ones
            for parameter in self.model.parameters():
                parameter.zero_()
        FakeLLM.started.append(self)

    def apply_model(self, func):
        self.calls.append("apply_model")
        missing = func(self.model)
        self.given = {name: tensor.clone() for name, tensor in self.model.inner.state_dict().items()}
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += self.noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
        return [missing]

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")
        return True

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls.append(f"wake {tags[0]}")

    def generate(self, prompts, sampling_params, *, use_tqdm):
        self.calls.append("generate")
        self.params = sampling_params
        assert len(prompts) == len(sampling_params) and not use_tqdm
        assert (
            max(len(prompt["prompt_token_ids"]) for prompt in prompts) + sampling_params[0].max_tokens
            <= (self.settings["max_model_len"])
        )
        outputs = []
        for prompt, params in zip(prompts, sampling_params, strict=True):
            config = SamplingConfig(
                params.max_tokens, params.temperature, params.top_k, params.top_p, params.seed, params.min_p
            )
            drawn = decode_responses(self.model.inner, [prompt["prompt_token_ids"]], config, params.stop_token_ids)
            tokens, log_probs = drawn.token_ids[0], drawn.log_probs[0]
            found = [{token: SimpleNamespace(logprob=value)} for token, value in zip(tokens, log_probs, strict=True)]
            reason = "length" if len(tokens) == params.max_tokens else "stop"  # vLLM looks at the length first
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(
                token_ids=tuple(tokens), logprobs=found, finish_reason=reason
            )]))  # fmt: skip
        return outputs


@pytest.fixture
def vllm(monkeypatch):
    """The stand-in, installed as the module vllm, on a machine that has a GPU."""
    module = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    module.LLM = FakeLLM

    def params(**settings):
        assert settings.keys() == PARAMS
        return SimpleNamespace(**settings)

    module.SamplingParams = params
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(vllm_sampler, "gpu_is_available", lambda: True)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    FakeLLM.started.clear()
    return module


@pytest.fixture
def built(stage, make_stage, tmp_path):
    """`built(**config changes)` -> config, prompts of an iteration, state and engine of a run that samples by vLLM."""

    def build(policy="sft", sampler="vllm", **changes):
        changes = {"training": TrainingConfig(batch_size=8, max_steps=3, seed=3), "minibatches": 1} | changes
        config = make_stage(
            "ppo", str(stage(policy) / "model"), tmp_path / "run", reward_model=str(stage("reward") / "model"),
            sampler=sampler, **changes,
        )[1]  # fmt: skip
        with Run(config.output, {}, stage="ppo") as run:
            data = read_data(config, run)
            state = build_state(config, data)
        return config, data.prompts_of, state, FakeLLM.started[-1] if FakeLLM.started else None

    return build


def given_now(llm, state):
    """Whether vLLM was last given the weights that the policy has now."""
    own = state.policy.backend.unwrapped.state_dict()
    return all(torch.equal(tensor, own[name]) for name, tensor in llm.given.items())


def test_every_sampling_is_by_the_weights_of_now_and_the_mismatch_is_corrected_and_logged(vllm, built):
    config, prompts_of, state, llm = built(optim=OptimConfig(learning_rate=1e-2), importance_cap=1.5)
    assert config.samples_differ
    before = {name: tensor.clone() for name, tensor in state.policy.backend.unwrapped.state_dict().items()}
    metrics, rollout = iterate(state, config, prompts_of(0), 0)
    assert_close(llm.given, before, atol=0, rtol=0)
    kept = (rollout.log_probs - rollout.sampled_log_probs).exp()[rollout.mask]
    assert_close(rollout.weights[rollout.mask], kept.clamp(max=1.5), atol=1e-6, rtol=0)
    assert (kept - 1).abs().max() > 1e-2
    assert metrics["first_ratio_error"] <= 1e-5 and metrics["sampling_error"] > 1e-2
    assert metrics["importance_weight_mean"] == pytest.approx(kept.clamp(max=1.5).mean().item(), abs=1e-5)
    assert "sampling_kl" in metrics and "importance_clipped_share" in metrics
    assert not given_now(llm, state)  # the update has moved the policy on
    rollout = collect(state, config, prompts_of(1), 1)
    assert given_now(llm, state)
    assert llm.calls == 2 * ["apply_model", "reset_prefix_cache", "generate"]
    llm.noise = 0.0  # an exact sampler: then nothing is to be corrected
    exact = collect(state, config, prompts_of(1), 1)
    assert_close(exact.weights[exact.mask], torch.ones_like(exact.weights[exact.mask]), atol=1e-4, rtol=0)


def test_what_vllm_is_told(vllm, built):
    config, prompts_of, state, llm = built(
        temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, micro_rollout_batch_size=5, max_new_tokens=4,
        vllm=VLLMConfig(gpu_memory_utilization=0.2, enforce_eager=True),
    )  # fmt: skip
    wanted = {
        "skip_tokenizer_init": True, "generation_config": "vllm", "dtype": "float32", "seed": 3, "max_num_seqs": 5,
        "gpu_memory_utilization": 0.2, "tensor_parallel_size": 1, "distributed_executor_backend": "uni",
        "enforce_eager": True, "enable_sleep_mode": False, "logprobs_mode": "processed_logprobs",
    }  # fmt: skip
    assert llm.settings.items() >= wanted.items()
    assert vllm_sampler.os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    rollout = collect(state, config, prompts_of(0), 2)
    one = llm.params[0]
    assert (one.temperature, one.top_k, one.top_p, one.min_p, one.max_tokens) == (0.7, 20, 0.9, 0.05, 4)
    assert one.stop_token_ids == state.stop_ids and one.ignore_eos and one.logprobs == 0 and not one.detokenize
    assert [each.seed for each in llm.params] == [row_seed(3, number) for number in rollout.numbers]
    seeds = {row_seed(seed, number) for seed in range(20) for number in range(200)}
    assert len(seeds) == 4000 and min(seeds) >= 0 and max(seeds) < 2**63
    assert collect(state, config, prompts_of(0), 2).responses == rollout.responses
    assert collect(state, config, prompts_of(0), 1).responses != rollout.responses


def test_sleep_gives_the_memory_back_between_samples(vllm, built):
    config, prompts_of, state, llm = built(vllm=VLLMConfig(sleep=True))
    assert llm.settings["enable_sleep_mode"] and llm.calls == ["sleep 2"]
    collect(state, config, prompts_of(0), 0)
    assert llm.calls[1:] == [
        "wake weights", "apply_model", "wake kv_cache", "reset_prefix_cache", "generate", "sleep 2",
    ]  # fmt: skip


@pytest.mark.parametrize("policy", ["sft", "sft lora"])
def test_an_adapter_is_merged_into_what_vllm_gets(vllm, built, policy):
    """Also on a start that has an adapter of its own, whose base is what vLLM reads."""
    config, prompts_of, state, llm = built(policy, adapter=LoRASpec(rank=2), optim=OptimConfig(learning_rate=1e-2))
    iterate(state, config, prompts_of(0), 0)
    llm.noise = 0.0
    exact = collect(state, config, prompts_of(1), 1)
    assert_close(exact.sampled_log_probs, exact.log_probs, atol=1e-4, rtol=0)
    assert (exact.log_probs - exact.reference_log_probs).abs().max() > 1e-2  # the adapter has learned


def test_the_greedy_baseline_held_out_prompts_and_online_dpo_sample_by_it_too(
    vllm, built, make_stage, stage, world, tmp_path
):
    config, prompts_of, state, llm = built(
        advantages="remax", max_new_tokens=4,
        held_out=HeldOutConfig(rewards=[RewardSpec(length=LengthSpec(target=3))], seed=9),
        data=DataConfig(train=world["prompts"], evaluation=world["prompts_eval"], max_length=256),
        training=TrainingConfig(batch_size=8, max_steps=3, evaluate_every_steps=2),
    )  # fmt: skip
    iterate(state, config, prompts_of(0), 0)
    assert llm.calls.count("generate") == 2 and {each.temperature for each in llm.params} == {0.0}
    judge_held_out(state, config, state.held_out)
    assert llm.calls.count("generate") == 3 and llm.params[0].seed == row_seed(9, 0)
    reward_model = str(stage("reward") / "model")
    _, config = make_stage(
        "online_dpo", str(stage("sft") / "model"), tmp_path / "online", reward_model=reward_model, sampler="vllm"
    )
    with Run(config.output, {}, stage="online_dpo") as run:
        data = read_online_data(config, run)
        state = build_online_state(config, data, run)
    sample_and_judge(state, config, data.prompts.rows_at(0), 0)
    assert FakeLLM.started[-1].calls.count("generate") == 1 and len(FakeLLM.started[-1].params) == 16


def test_responses_are_read_from_vllms():
    def response(tokens, reason):
        found = [{99: None, token: SimpleNamespace(logprob=-0.5 * token)} for token in tokens]
        return SimpleNamespace(token_ids=tokens, logprobs=found, finish_reason=reason)

    read = as_responses([response([3, 7], "stop"), response([3, 4], "length"), response([4, 7], "length")], [7])
    assert read.token_ids == [[3, 7], [3, 4], [4, 7]] and read.ended == [True, False, True]
    assert read.log_probs == [[-1.5, -3.5], [-1.5, -2.0], [-2.0, -3.5]]
    assert as_responses([response([3, 7], "stop")], [7], greedy=True).log_probs == [[0.0, 0.0]]
    with pytest.raises(RuntimeError, match="abort"):
        as_responses([response([3], "abort")], [7])


def test_processes_that_hold_a_model_together_sample_each_others_rows(vllm, built):
    """Four processes, two to a model: the third one samples its rows and the fourth one's, and keeps its own."""
    config, prompts_of, state, llm = built(max_new_tokens=4)
    sampling, numbers = config.sampling, [4, 5, 6]
    prompts = [list(prompt.ids) for prompt in prompts_of(0)][:3]
    alone = state.sampler(prompts, numbers, sampling)
    rows = list(zip(prompts, numbers, strict=True))
    others = {0: [([1], 0)], 1: [([1], 1)]}
    for rank, everyone in ((2, [*others.values(), rows, [([1, 5], 9)]]), (3, [*others.values(), [([1, 5], 9)], rows])):
        group = SimpleNamespace(rank=rank, gather_objects=lambda mine, everyone=everyone: everyone)
        policy = SimpleNamespace(process_group=group, backend=state.policy.backend)
        settings = SimpleNamespace(vllm=VLLMConfig(tensor_parallel_size=2))
        together = VLLMSampler(vllm, llm, policy, state.stop_ids, settings)(prompts, numbers, sampling)
        assert len(llm.params) == 4 and together.token_ids == alone.token_ids


def test_a_foreign_models_weights_go_under_transformers_names_and_tied_ones_once(tmp_path):
    from transformers import AutoModelForCausalLM, CohereConfig

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    inner = AutoModelForCausalLM.from_config(CohereConfig(vocab_size=40, **sizes))
    inner.save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    assert model.source == "transformers"
    given, read = dict(named_as_saved(model, model.state_dict())), inner.state_dict()
    assert given.keys() == {name for name, _ in inner.named_parameters()}
    assert all(torch.equal(tensor, read[name]) for name, tensor in given.items())


# Refusals


def test_a_weight_that_vllm_did_not_take_ends_the_run(vllm, built, monkeypatch):
    config, prompts_of, state, llm = built()
    monkeypatch.setattr(vllm_sampler, "named_as_saved", lambda model, state: list(named_as_saved(model, state))[1:])
    with pytest.raises(RuntimeError, match=r"embed.*did not get the policy's weights"):
        collect(state, config, prompts_of(0), 0)
    monkeypatch.undo()
    llm.reset_prefix_cache = lambda: False
    with pytest.raises(RuntimeError, match="reset_prefix_cache failed"):
        state.sampler([[1]], [0], config.sampling)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, r"needs vLLM and a GPU .*pip install -e '.\[vllm\]'"),
        ({"gpu": False}, "torch finds none"),
        ({"vllm": VLLMConfig(tensor_parallel_size=2)}, "tensor_parallel_size 2 does not divide"),
        ({"adapter": PrefixSpec(tokens=2)}, "a prefix adapter is no change of weights"),
        ({"adapter": LoRASpec(rank=2), "weights": WeightsConfig(quantize="nf4")}, "weights.quantize=nf4"),
    ],
)
def test_what_vllm_cannot_do_is_refused_before_a_model_is_loaded(request, monkeypatch, built, changes, words):
    monkeypatch.setitem(sys.modules, "vllm", None)
    if changes:
        request.getfixturevalue("vllm")
        monkeypatch.setattr(vllm_sampler, "gpu_is_available", lambda: changes.get("gpu", True))
    monkeypatch.setattr(setup, "load_policy", None)
    with pytest.raises(UserError, match=words):
        built(**{name: value for name, value in changes.items() if name != "gpu"})


def test_an_adapter_on_one_of_two_layers_that_share_a_weight_is_refused():
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    refuse_untied(model)
    model["head"] = nn.ModuleDict({"base_layer": model["head"]})
    with pytest.raises(UserError, match=r"embed\.weight and head\.base_layer\.weight"):
        refuse_untied(model)


@pytest.mark.parametrize(
    "settings",
    [
        {"sampler": "vllm", "temperature": 0.005}, {"sampler": "vllm", "rollout_weights": "sharded"},
        {"vllm": VLLMConfig(sleep=True)},
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(settings):
    required = {"policy": "p", "reward_model": "r", "output": "o", "data": DataConfig(train="prompts")}
    with pytest.raises(ValueError, match=r"temperature|sharded|sampler=engine"):
        PPOConfig(**required, **settings)


@pytest.mark.parametrize("settings", [{"gpu_memory_utilization": 1.0}, {"tensor_parallel_size": 0}])
def test_impossible_settings_of_vllm_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        VLLMConfig(**settings)
