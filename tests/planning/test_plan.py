"""Plans of tiny models against counts by hand, the command's exit codes, and what changes a plan."""

import json
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import yaml

from alignment.adapters import LoRASpec, PrefixSpec, PromptSpec
from alignment.algorithms.distill import DistillConfig
from alignment.algorithms.dpo import DPOConfig
from alignment.algorithms.finetune.finetune import FinetuneConfig
from alignment.algorithms.online_dpo import OnlineDPOConfig
from alignment.algorithms.ppo import PPOConfig
from alignment.algorithms.pretrain import PretrainConfig
from alignment.algorithms.sft import SFTConfig
from alignment.cli import main
from alignment.commands.plan import plan_lines, stage_of
from alignment.config.load import load_config, packaged_folder
from alignment.data.batches import Example
from alignment.data.config import DataConfig, SourceConfig
from alignment.data.rows.records import Comparison, LabeledResponse, Prompt, Ranking, Steps, Text
from alignment.errors import UserError
from alignment.models.weights_config import WeightsConfig
from alignment.planning.layout import Device, Layout, read_layout
from alignment.planning.networks import quantized_bytes
from alignment.planning.plan import (
    Data,
    characters_of,
    largest_that_fits,
    make_plan,
    mean_tokens,
    read_training_rows,
    run_length,
)
from alignment.planning.stages import find_start, packaged_bases, workload_of
from alignment.training import OptimConfig, TrainingConfig
from tests.conftest import write_lines
from tests.distributed.processes import run_ranks
from tests.examples import pair_example

CPU = Device(False, None, "cpu", 1.0)
GPU = Device(True, 24 * 10**9, "RTX 4090", 165.0)

# Width 64, inner 128, 2 layers, 4 heads of 16, 2 of keys and values, 512 tokens, head of its own:
#   a layer: query and output 64 * 64 each, key and value 64 * 32 each, gate, up and down 64 * 128 each, 2 norms of 64
LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
TABLES = 512 * 64
PARAMETERS = 2 * LAYER + 2 * TABLES + 64
NORMS = 2 * 2 * 64 + 64
RANK = 4
# Both factors of every linear layer: rank * (columns + rows).
LORA = 2 * RANK * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A directory with the config.json of a bfloat16 Llama, and nothing else."""
    folder = tmp_path_factory.mktemp("base")
    config = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "dtype": "bfloat16",
        "tie_word_embeddings": False, "attention_dropout": 0.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def sft_config(base, **changes):
    training = changes.pop("training", {})
    return SFTConfig(
        policy=base,
        data=DataConfig("nowhere.jsonl", max_length=128),
        output="out",
        optim=changes.pop("optim", OptimConfig(1e-4)),
        training=TrainingConfig(**{"batch_size": 4, "micro_batch_tokens": 512, "max_steps": 3, **training}),
        **changes,
    )


def kinds(plan):
    [peak] = plan.peaks
    return {kind: peak.of_kind(kind) for kind in ("weights", "gradients", "optimizer")}


def test_full_training_holds_four_bytes_a_weight_and_eight_of_state(base):
    plan = make_plan(sft_config(base), Layout(), CPU)
    assert [(role.parameters, role.trained) for role in plan.roles] == [(PARAMETERS, PARAMETERS)]
    assert kinds(plan)["weights"] == 4 * PARAMETERS
    scalars = 4 * (2 * 9 + 3)  # AdamW's step of each parameter
    assert kinds(plan)["optimizer"] == 8 * PARAMETERS + scalars


def test_an_adapter_leaves_the_base_in_its_own_type_and_trains_in_float32(base):
    plan = make_plan(sft_config(base, adapter=LoRASpec(rank=RANK)), Layout(), CPU)
    [role] = plan.roles
    assert (role.parameters, role.trained) == (PARAMETERS + LORA, LORA)
    assert kinds(plan)["weights"] == 2 * (PARAMETERS - NORMS) + 4 * NORMS + 4 * LORA


def test_nf4_takes_half_a_byte_a_weight_and_its_scales(base):
    # 64 * 64 weights: 2048 bytes of codes, 64 scales of one byte in one block of 4, and 1092 bytes of tables.
    assert quantized_bytes(64, 64, "nf4") == 2048 + 64 + 4 + 1092
    assert quantized_bytes(64, 64, "int8") == 4096 + 256
    config = sft_config(base, adapter=LoRASpec(rank=RANK), weights=WeightsConfig(quantize="nf4"))
    plan = make_plan(config, Layout(), CPU)
    shapes = [(64, 64), (64, 64), (32, 64), (32, 64), (128, 64), (128, 64), (64, 128)]
    blocks = 2 * sum(quantized_bytes(*shape, "nf4") for shape in shapes)
    assert kinds(plan)["weights"] == blocks + 2 * 2 * TABLES + 4 * NORMS + 4 * LORA
    assert plan.roles[0].parameters == PARAMETERS + LORA  # weights, and not the bytes that hold them


@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_pretrain_and_finetune_hold_frozen_weights_as_weights_says(base, stage, quantize):
    common = {
        "policy": base, "data": DataConfig("nowhere.jsonl", max_length=64), "output": "out",
        "weights": WeightsConfig(quantize=quantize), "adapter": LoRASpec(rank=RANK),
        "training": TrainingConfig(batch_size=2, micro_batch_tokens=128, max_steps=1),
    }  # fmt: skip
    config = PretrainConfig(**common) if stage == "pretrain" else FinetuneConfig(task="classification", **common)
    [role] = (plan := make_plan(config, Layout(), CPU)).roles
    shapes = [(64, 64), (64, 64), (32, 64), (32, 64), (128, 64), (128, 64), (64, 128)]
    blocks = 2 * sum(2 * m * n if quantize is None else quantized_bytes(m, n, "nf4") for m, n in shapes)
    tables = 2 * 2 * TABLES if stage == "pretrain" else 2 * TABLES + 4 * 2 * 64  # a head of two classes, in float32
    assert kinds(plan)["weights"] == blocks + tables + 4 * NORMS + 4 * LORA
    assert role.trained == LORA + (0 if stage == "pretrain" else 2 * 64)


def test_bitsandbytes_holds_as_many_bytes_as_are_counted():
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(torch.ones(96, 64), quant_type="nf4", compress_statistics=True)
    held = [packed, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    assert sum(x.numel() * x.element_size() for x in held) == quantized_bytes(96, 64, "nf4")


def test_dpo_with_an_adapter_has_no_second_model_and_without_one_it_has(base):
    def roles(adapter):
        config = DPOConfig(
            policy=base, data=DataConfig("nowhere.jsonl", max_length=64), output="out", adapter=adapter,
            training=TrainingConfig(batch_size=2, micro_batch_tokens=256, max_steps=1),
        )  # fmt: skip
        return [role.role for role in make_plan(config, Layout(), CPU).roles]

    assert roles(LoRASpec(rank=RANK)) == ["policy"]
    assert roles(None) == ["policy", "reference"]


@pytest.mark.parametrize("adapter", [None, PromptSpec(tokens=4), PrefixSpec(tokens=4)])
def test_known_pairs_are_traced_with_their_prompts_shared(base, adapter):
    """Prompts of 60 tokens and responses of 4: of the 2 * 64 tokens of a pair only 68 are computed."""
    sides = [Example.single([1] * 60 + [n] * 4, [False] * 60 + [True] * 4, "row") for n in (2, 3)]
    pairs = [pair_example(sides[0], sides[1], None, "row")] * 4

    def activations(share):
        training = TrainingConfig(batch_size=4, micro_batch_tokens=4096, max_steps=1, share_prompts=share)
        config = DPOConfig(base, DataConfig("nowhere.jsonl", max_length=64), "out", adapter=adapter, training=training)
        [peak] = make_plan(config, Layout(), CPU, data=Data(examples=pairs)).peaks
        return peak.of_kind("activations")

    assert 0.5 < activations(True) / activations(False) < 0.9


@pytest.mark.slow
def test_checkpointing_and_micro_batches_lower_the_activations(base):
    def activations(tokens, **training):
        config = sft_config(base, training={"micro_batch_tokens": tokens, **training})
        [peak] = make_plan(config, Layout(), CPU).peaks
        return peak.of_kind("activations") + peak.of_kind("logits")  # the peak may lie at the head or in a layer

    by_choice = [
        activations(512),
        activations(512, gradient_checkpointing=True, keep_activations="products"),
        activations(512, gradient_checkpointing=True, keep_activations="attention"),
        activations(512, gradient_checkpointing=True),
        activations(128, gradient_checkpointing=True),
    ]
    assert by_choice == sorted(by_choice, reverse=True) and len(set(by_choice)) == 5


def test_shards_are_parts_of_what_one_device_would_hold(base):
    alone, sharded = (kinds(make_plan(sft_config(base), layout, CPU)) for layout in (Layout(), Layout("fsdp2", 2, 2)))
    assert sharded["weights"] == pytest.approx(alone["weights"] / 2, rel=1e-3)
    assert sharded["optimizer"] == pytest.approx(alone["optimizer"] / 2, rel=1e-3)
    zero2 = kinds(make_plan(sft_config(base), Layout("zero2", 2, 2), CPU))
    assert zero2["weights"] == alone["weights"]
    assert zero2["optimizer"] == pytest.approx((alone["optimizer"] + 4 * PARAMETERS) / 2, rel=1e-3)
    assert kinds(make_plan(sft_config(base), Layout("fsdp2", 2, 2, offload=True), CPU))["weights"] == 0


def test_a_layer_of_llama_8b_keeps_little_for_a_token_on_a_gpu(tmp_path):
    def activations(layers):
        config = {
            "model_type": "llama", "vocab_size": 512, "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8, "dtype": "bfloat16",
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config))
        training = {"batch_size": 512, "micro_batch_tokens": 8192, "precision": "bf16"}
        [peak] = make_plan(sft_config(str(tmp_path), training=training), Layout("fsdp2", 8, 8), GPU).peaks
        return peak.of_kind("activations")

    kept = (activations(6) - activations(2)) / 4 / 8192
    by_hand = (
        (2 * 4 + 2 * 2) * 4096 + 2 * (2 * 4096 + 2 * 1024) + 4 * 2 * 14336
    )  # residuals, norms, attention, feed-forward
    assert by_hand <= kept <= 1.01 * by_hand < 6e6 / 32


def test_sharded_weights_leave_no_copies_in_the_computing_type(base):
    def activations(layout):
        return make_plan(sft_config(base, training={"precision": "bf16"}), layout, GPU).peaks[0].of_kind("activations")

    matrices = 2 * 2 * (LAYER - 2 * 64)  # in bfloat16; the head's copy is made for a moment with both
    assert activations(Layout("ddp", 2)) - activations(Layout("fsdp2", 2, 2)) == pytest.approx(matrices, rel=0.25)
    assert activations(Layout("zero3", 2, 2)) == activations(Layout("fsdp2", 2, 2))


@pytest.fixture(scope="module")
def sharded_ppo(base):
    """A device's memory, or None -> the plan of PPO on all weights, on two of them, in bf16."""
    config = PPOConfig(
        policy=base, reward_model=base, data=DataConfig("nowhere.jsonl", max_length=32), output="out", max_new_tokens=16,
        training=TrainingConfig(batch_size=4, micro_batch_tokens=96, max_steps=1, precision="bf16"),
        weights=WeightsConfig(dtype="bfloat16"),
    )  # fmt: skip
    return lambda memory: make_plan(config, Layout("fsdp2", 2, 2), Device(True, memory, "", 1.0))


def test_sharded_ppo_samples_from_whole_copies_and_leaves_judges_whole(sharded_ppo):
    sampling, *others = sharded_ppo(None).peaks
    matrices = 2 * (LAYER - 2 * 64)  # of the blocks: bfloat16; embedding, head and norms compute in float32
    assert sampling.phase == "sampling (gathered)"
    assert sampling.parts["unsharded blocks and buckets"] == 2 * matrices + 4 * (PARAMETERS - matrices)
    scalar = PARAMETERS - TABLES + 64  # one number per token in the place of the head
    for phase in (sampling, *others):
        assert phase.parts["weights of policy"] == 4 * PARAMETERS // 2
        assert phase.parts["weights of value model"] == 4 * scalar // 2
        assert phase.parts["weights of reference"] == 2 * (PARAMETERS - NORMS) + 4 * NORMS  # frozen: not cut
        assert phase.parts["weights of reward model"] == 2 * (scalar - NORMS - 64) + 4 * (NORMS + 64)
        assert phase is sampling or phase.parts["unsharded blocks and buckets"] < 4 * 4 * PARAMETERS


def test_sharded_ppo_samples_block_by_block_where_whole_copies_do_not_fit(sharded_ppo):
    enough = sharded_ppo(None)
    least = next(phase.total for phase in enough.peaks if phase.phase.startswith("sampling"))
    [sampling, *_] = sharded_ppo(1_400_000_000 + least).peaks  # 0.8 and 0.6 GB of libraries, and 3 % are kept free
    assert sampling.phase == "sampling (sharded)"
    assert sampling.total < least
    # Both blocks at once, and what is outside of them: half of each is missing in the shard.
    assert sampling.parts["unsharded blocks and buckets"] == 4 * PARAMETERS // 2


def test_launch_files_say_how_the_model_lies_on_the_devices():
    assert read_layout(None, None) == Layout("single", 1)
    assert read_layout(None, 4) == Layout("ddp", 4)
    assert read_layout("launch/fsdp2", 8) == Layout("fsdp2", 8, 8)
    assert read_layout("launch/zero3", 4) == Layout("zero3", 4, 4)
    for gpus, of_machine in ((4, 4), (8, 8), (16, 8), (32, 8), (12, 6)):  # machines of up to 8 GPUs
        assert read_layout("launch/fsdp2_hybrid", gpus) == Layout("fsdp2", gpus, of_machine)
    with pytest.raises(UserError, match="equally many"):
        read_layout("launch/fsdp2_hybrid", 9)
    with pytest.raises(UserError, match="no such file"):
        read_layout("launch/zero9", 4)


# Starts


def test_a_missing_start_is_traced_through_the_configs_that_write_it():
    start = find_start("runs/llama3.1_8b_80gb/sft/model")
    assert start.base == "meta-llama/Llama-3.1-8B" and start.dtype == torch.bfloat16
    [adapter] = start.adapters
    assert isinstance(adapter, LoRASpec)


def test_a_hub_name_without_known_shapes_says_what_helps():
    with pytest.raises(UserError, match="hf download nobody/nothing"):
        find_start("nobody/nothing")


GPT2 = {
    "gpt2_124m": "openai-community/gpt2",
    "gpt2_355m": "openai-community/gpt2-medium",
    "gpt2_774m": "openai-community/gpt2-large",
    "gpt2_1.5b": "openai-community/gpt2-xl",
}


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "Qwen/Qwen3-0.6B", "google/gemma-3-1b-pt", *GPT2.values()])
def test_packaged_bases_have_the_published_number_of_weights(name):
    from alignment.models.build import empty_model

    file, config = packaged_bases()[name]
    with torch.device("meta"):
        model = empty_model(config, "language")
    published = json.loads((packaged_folder("configs") / "bases" / file).read_text())["parameters"]
    assert sum(parameter.numel() for parameter in model.parameters()) == published


@pytest.mark.parametrize(
    ("config", "base"),
    [pytest.param(*pair, marks=[] if pair[0] == "gpt2_124m" else pytest.mark.slow) for pair in GPT2.items()],
)
def test_gpt2_s_sizes_are_planned_from_nothing_without_a_tokenizer_s_files(config, base):
    planned = make_plan(load_config(PretrainConfig, f"pretrain/{config}"), Layout("ddp", 8), GPU)
    published = json.loads((packaged_folder("configs") / "bases" / packaged_bases()[base][0]).read_text())["parameters"]
    assert [(role.parameters, role.trained) for role in planned.roles] == [(published, published)]
    assert planned.peak.parts["weights of policy"] >= 4 * published  # float32
    assert planned.fits == (config != "gpt2_1.5b")


# The command


@pytest.fixture
def config_file(base, tmp_path):
    values = {
        "policy": base, "output": str(tmp_path / "out"), "data": {"train": "nowhere.jsonl", "max_length": 128},
        "optim": {"learning_rate": 1e-4}, "training": {"batch_size": 4, "micro_batch_tokens": 512, "max_steps": 3},
    }  # fmt: skip
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(values))
    return str(file)


def test_the_command_says_0_where_the_run_fits_and_2_where_it_does_not(config_file, capsys):
    assert main(["plan", config_file, "--stage", "sft", "--gpu-memory", "24"]) == 0
    text = capsys.readouterr().out
    assert "weights of policy" in text and "3 updates of 4 rows" in text and "computed, not measured" in text
    assert main(["plan", config_file, "--stage", "sft", "--gpu-memory", "0.803", "--json"]) == 2
    out, error = capsys.readouterr()
    assert error.count("\n") == 1 and "does not fit" in error and "gradient_checkpointing=true" in error
    plan = json.loads(out)
    assert plan["fits"] is False and plan["needed_bytes"] > 803_000_000


def advice_of(plan):
    with pytest.raises(UserError) as refusal:
        import_module("alignment.planning.plan").require_fit(plan, "mine")
    return str(refusal.value)


def test_advice_names_what_saves_and_what_then_fits(base):
    config = sft_config(base, training={"micro_batch_tokens": 2048})
    needed = make_plan(config, Layout(), GPU).needed
    checkpointing = {"micro_batch_tokens": 2048, "gradient_checkpointing": True}
    saved = needed - make_plan(sft_config(base, training=checkpointing), Layout(), GPU).needed
    tight = replace(GPU, memory=needed - saved)
    first = advice_of(make_plan(config, Layout(), tight))
    assert f"training.gradient_checkpointing=true saves {saved / 1e9:.3g} GB: with that" in first
    set_already = sft_config(base, training=checkpointing, adapter=LoRASpec(rank=RANK))
    none = advice_of(make_plan(set_already, Layout(), replace(GPU, memory=10**8)))
    assert "checkpointing" not in none and "lora" not in none and "still needed" in none
    assert "--gpus" not in none  # a communicator takes more than the shards of so small a base save
    auto = sft_config(base, training={"batch_size": 64, "micro_batch_tokens": "auto"})
    assert "saves" in advice_of(make_plan(auto, Layout(), replace(GPU, memory=10**8)))


def test_advice_for_a_peak_in_sampling_begins_with_fewer_responses(base):
    config = PPOConfig(
        policy=base, reward_model=base, data=DataConfig("nowhere.jsonl", max_length=64), output="out",
        max_new_tokens=960, micro_rollout_batch_size=256, training=TrainingConfig(batch_size=256, micro_batch_tokens=1024),
    )  # fmt: skip
    plan = make_plan(config, Layout(), GPU)
    assert plan.peak.phase == "sampling"
    needed = make_plan(replace(config, micro_rollout_batch_size=128), Layout(), GPU).needed
    assert "missing; micro_rollout_batch_size=128 saves" in advice_of(
        make_plan(config, Layout(), replace(GPU, memory=needed))
    )


@pytest.mark.parametrize(
    ("keys", "stage"),
    [
        ("judge: gold", "online_dpo"), ("responses_per_prompt: 2\nbeta: 0.1", "online_dpo"), ("task: classification", "finetune"),
        ("responses_per_prompt: 2\nadvantages: rloo", "ppo"), ("reward_model: y\nkl_coef: 0.1", "ppo"),
        ("teacher: y", "distill"), ("", None),
    ],
)  # fmt: skip
def test_a_stage_is_found_by_its_keys_and_asked_for_otherwise(tmp_path, keys, stage):
    file = tmp_path / "a.yaml"
    file.write_text(f"policy: x\n{keys}\n")
    assert stage_of("ppo/tiny", file) == "ppo"
    if stage is not None:
        assert stage_of("a.yaml", file) == stage
        return
    with pytest.raises(UserError, match="--stage sft"):
        stage_of("a.yaml", file)


@pytest.mark.parametrize("held", [True, False])
def test_online_dpo_samples_scores_and_learns_from_pairs(base, held):
    """A gold judge and a loss without a reference leave one network; a row that is learned from is a pair."""
    config = OnlineDPOConfig(
        base, DataConfig("nowhere.jsonl", max_length=128), "out", responses_per_prompt=4, max_new_tokens=32,
        training=TrainingConfig(batch_size=4, micro_batch_tokens="auto", max_steps=3),
        **({"reward_model": base} if held else {"judge": "gold", "loss": "simpo"}),
    )  # fmt: skip
    plan = make_plan(config, Layout(), GPU)
    roles = {"policy", "reference", "reward model"} if held else {"policy"}
    assert {role.role for role in plan.roles} == roles
    assert {role.role for role in plan.roles if role.trained} == {"policy"}
    assert [peak.phase for peak in plan.peaks] == ["sampling", *(["scoring"] if held else []), "policy update"]
    update = plan.peaks[-1]
    assert update.parts["weights of policy"] == 4 * PARAMETERS
    assert 8 * PARAMETERS <= update.of_kind("optimizer") < 8 * PARAMETERS + 1000  # and the numbers of steps
    assert plan.tokens == 4 * 2 * (128 + 32) and plan.length.tokens == 3 * 4 * 4 * (128 + 32)


@pytest.mark.parametrize("likeliest", [None, 16])
def test_distillation_holds_the_teacher_and_asks_it_in_the_updates(base, likeliest):
    config = DistillConfig(
        base, DataConfig("nowhere.jsonl", max_length=128), "out", teacher=base, likeliest=likeliest, max_new_tokens=32,
        training=TrainingConfig(batch_size=4, micro_batch_tokens=640, max_steps=3),
    )  # fmt: skip
    plan = make_plan(config, Layout(), GPU)
    assert {role.role: role.trained for role in plan.roles} == {"policy": PARAMETERS, "teacher": 0}
    sampling, update = plan.peaks
    assert (sampling.phase, update.phase) == ("sampling", "policy update")
    # both checkpoints are bfloat16; what trains is float32, and the teacher stays as it is but for its norms
    assert update.parts["weights of policy"] == 4 * PARAMETERS
    assert update.parts["weights of teacher"] == 2 * (PARAMETERS - NORMS) + 4 * NORMS
    assert update.of_kind("logits") > 4 * 4 * 32 * 512  # float32 logits of 4 responses of 32 tokens, and more than once
    assert plan.length.tokens == 3 * 4 * (128 + 32)


# auto


def test_the_largest_micro_batch_is_found():
    tried = []

    def needed(tokens):
        tried.append(tokens)
        return 1000 + 10 * tokens

    assert largest_that_fits(needed, 1000 + 10 * 640, row=64, most=6400) == 640
    assert len(tried) <= 8
    assert largest_that_fits(needed, 10**9, row=64, most=6400) == 6400


def test_auto_takes_what_fits_the_device(base):
    config = sft_config(base, training={"batch_size": 64, "micro_batch_tokens": "auto"})
    most = make_plan(config, Layout(), replace(GPU, memory=24 * 10**9))
    assert most.tokens == 64 * 128  # a whole update
    less = make_plan(config, Layout(), replace(GPU, memory=(most.needed + 810_000_000) // 2))
    assert 128 <= less.tokens < most.tokens and less.fits


def test_the_length_of_a_mixture_is_that_of_its_draws(checkpoints, tmp_path):
    """Sources of 6 and 2 rows, the second drawn three times in four: 8 draws an epoch, and more of its shorter rows."""
    from alignment.data.stream import stream_of

    for name, count, response in (("a", 6, "one two three four five six"), ("b", 2, "one")):
        rows = [f'{{"prompt": "{name} {number}", "completion": " {response}"}}\n' for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    train = [SourceConfig(str(tmp_path / f"{name}.jsonl"), weight=weight) for name, weight in (("a", 1.0), ("b", 3.0))]
    data = DataConfig(train, mixing="weights", max_length=64)
    training = TrainingConfig(batch_size=4, epochs=2, micro_batch_tokens=256)
    config = SFTConfig(policy=checkpoints["llama"], data=data, output="out", training=training)
    stage = workload_of(config)
    read = read_training_rows(config, stage)
    assert read.rows == 8 and len(read.examples) == 8
    stream = stream_of(data, read.examples, batch_size=4, seed=0, epochs=2)
    assert run_length(config, replace(stage, networks={}), read, {}, 1).steps == 4 and len(stream.rows_at(3)) == 4
    with pytest.raises(IndexError):
        stream.rows_at(4)
    long, short = (len(read.examples[index].ids) for index in (0, 6))
    assert mean_tokens(data, read.examples) == pytest.approx((long + 3 * short) / 4)
    assert mean_tokens(DataConfig([str(tmp_path / "a.jsonl")]), read.examples) == pytest.approx(
        (6 * long + 2 * short) / 8
    )
    assert Data(8).examples is None


def test_without_a_tokenizer_tokens_are_estimated_from_the_characters(base, tmp_path, capsys):
    """Ten rows of 12 + 28 characters are about 10 tokens each, and not data.max_length."""
    rows = [{"prompt": f"question {number:2d} ", "completion": "a" * 28} for number in range(10)]
    write_lines(tmp_path / "rows.jsonl", rows)
    values = {
        "policy": base, "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 1024}, "output": "out",
        "training": {"batch_size": 5, "micro_batch_tokens": 1024, "epochs": 3},
    }  # fmt: skip
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(values))
    assert main(["plan", str(tmp_path / "sft.yaml"), "--gpu-memory", "24", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["tokens"] == pytest.approx(3 * 10 * 40 / 4) and plan["counted"] == "characters"
    assert main(["plan", str(tmp_path / "sft.yaml"), "--gpu-memory", "24"]) == 0
    text = capsys.readouterr().out
    assert "about 300 tokens" in text and "taken to be an RTX 4090" in text


@pytest.mark.parametrize(
    ("record", "characters"),
    [
        (Text("abcd", "1"), 4),
        (Prompt("abc", {"answer": "long"}, "1"), 3),
        (Comparison("abc", "de", "fgh", None, "1"), 2 * 3 + 2 + 3),
        (Ranking("abc", ("d", "ef"), (0, 1), "1"), 2 * 3 + 1 + 2),
        (Steps("abc", ("de", "f"), (True, False), "1"), 3 + 2 + 1),
        (LabeledResponse([{"role": "user", "content": "abc"}], "de", True, "1"), len("user") + 3 + 2),
    ],
)
def test_the_characters_of_a_row_are_those_of_its_documents(record, characters):
    assert characters_of(record) == characters


def test_the_time_of_ppo_counts_the_weights_that_sampling_reads(base):
    """2 updates of 4 prompts with 2 responses in batches of 4: 2 * 2 * 16 passes over the weights, 4 bytes each."""
    config = PPOConfig(
        policy=base, reward_model=base, data=DataConfig("nowhere.jsonl", max_length=64), output="out",
        max_new_tokens=16, responses_per_prompt=2, micro_rollout_batch_size=4,
        training=TrainingConfig(batch_size=4, micro_batch_tokens=512, max_steps=2),
    )  # fmt: skip
    plan = make_plan(config, Layout(), replace(GPU, bandwidth=1e12))
    assert plan.length.decoding_bytes == 2 * 2 * 16 * 4 * PARAMETERS
    slower = replace(plan, device=replace(plan.device, bandwidth=0.5e12))
    assert slower.seconds(0.5) - plan.seconds(0.5) == pytest.approx(plan.length.decoding_bytes / 0.5e12)
    # Sharded over 4, each pass gathers three quarters of them at 300 GB/s inside a machine.
    sharded = make_plan(replace(config, rollout_weights="sharded"), Layout("fsdp2", 4, 4), GPU)
    whole = make_plan(replace(config, rollout_weights="gathered"), Layout("fsdp2", 4, 4), GPU)
    gathers = 0.75 * sharded.length.decoding_bytes / 3e11
    assert sharded.seconds(0.5) - whole.seconds(0.5) == pytest.approx(gathers)
    assert "in bf16 this machine's processor" in "".join(plan_lines(replace(plan, device=CPU), 0.5))
    assert "about" in "".join(plan_lines(sharded, 0.5)) and "policy update" in "".join(plan_lines(sharded, 0.5))


def test_a_run_writes_its_choice_and_a_resume_keeps_it(checkpoints, world, tmp_path, monkeypatch, capsys):
    values = {
        "policy": str(checkpoints["llama"]), "output": str(tmp_path / "run"),
        "data": {"train": world["demonstrations"], "max_length": 128}, "optim": {"learning_rate": 1e-3},
        "training": {"max_steps": 2, "batch_size": 4, "micro_batch_tokens": "auto", "save_every_steps": 1},
    }  # fmt: skip
    file = tmp_path / "sft.yaml"
    file.write_text(yaml.safe_dump(values))
    assert main(["sft", str(file)]) == 0
    chosen = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["training"]["micro_batch_tokens"]
    assert isinstance(chosen, int) and chosen > 0
    assert f"training.micro_batch_tokens: auto: {chosen}" in capsys.readouterr().err

    monkeypatch.setattr("alignment.planning.plan._choose", lambda config: pytest.fail("a resume chose again"))
    assert main(["sft", str(file)]) == 0
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["training"]["micro_batch_tokens"]
    assert kept == chosen


def test_a_config_that_was_not_resolved_says_who_does_it():
    with pytest.raises(ValueError, match="resolve_micro_batch") as refused:
        _ = TrainingConfig(micro_batch_tokens="auto").tokens_per_forward
    named = next(word for word in str(refused.value).split() if word.startswith("alignment."))
    module, _, function = named.rpartition(".")
    assert callable(getattr(import_module(module), function))
    assert TrainingConfig(micro_batch_tokens=64).tokens_per_forward == 64


@pytest.mark.distributed_slow
def test_where_nothing_fits_all_ranks_end_with_one_message(checkpoints, world, tmp_path):
    """Both ranks run the command; 1 GB is too little for any run, since libraries alone are counted with 0.8 GB."""
    values = {
        "policy": str(checkpoints["llama"]), "output": str(tmp_path / "run"),
        "data": {"train": world["demonstrations"], "max_length": 128},
        "training": {"max_steps": 1, "batch_size": 4, "micro_batch_tokens": "auto"},
    }  # fmt: skip
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(values))
    output = run_ranks(2, "tests.planning.short_of_memory", str(tmp_path / "sft.yaml"), str(tmp_path), seconds=120)
    said = output + (tmp_path / "rank-1").read_text()
    assert said.count("auto: one row of") == 1, said
