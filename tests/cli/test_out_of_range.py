"""Numbers no run can have and keys of other programs: code 2 and one line each, all at once, before any model is looked for."""

import re
from functools import partial

import pytest
import torch

from alignment.cli import main
from alignment.config.load import build
from alignment.config.schema import config_keys
from alignment.config.yaml_source import SourcedYaml, override, parse_yaml
from alignment.errors import UserError, raise_all
from alignment.pipeline.stages import find_stage

GOOD = {
    "sft": "policy: ./nowhere\noutput: out\ndata: {train: nowhere.jsonl}\n",
    "ppo": "policy: ./nowhere\nreward_model: ./nowhere\noutput: out\ndata: {train: nowhere.jsonl}\n",
    "reward": "policy: ./nowhere\noutput: out\ndata: {train: nowhere.jsonl}\n",
    "dpo": "policy: ./nowhere\noutput: out\ndata: {train: nowhere.jsonl}\n",
    "language": "model: ./nowhere\noutput: out\ndata: {train: nowhere.jsonl}\n",
    "reward_eval": "reward_model: ./nowhere\noutput: out\ndata: {train: nowhere.jsonl}\n",
    "pretrain": "policy: ./nowhere\noutput: out\ndata: {train: nowhere.jsonl}\n",
    "winrate": "models: {a: ./nowhere}\nbaseline: a\njudge: longer\noutput: out\ndata: {train: nowhere.jsonl}\n",
}
HUGE = str(10**30)


@pytest.fixture
def refusal(tmp_path, monkeypatch, capsys):
    """What a verb says to some overrides of good settings; it must end with code 2 and leave no output."""
    monkeypatch.chdir(tmp_path)

    def run(verb: str, *overrides: str) -> str:
        (tmp_path / "run.yaml").write_text(GOOD[verb])
        (tmp_path / "nowhere.jsonl").touch()
        code = main([*(["evaluate"] if verb == "winrate" else []), verb, "run.yaml", *overrides])
        message = capsys.readouterr().err
        assert code == 2, message
        assert not (tmp_path / "out").exists()
        return message

    return run


@pytest.mark.parametrize(
    ("adapter", "why"),
    [
        ("adapter={kind: lora, rank: 0}", "rank: must be at least 1, got 0"),
        ("adapter={kind: lora, alpha: -1}", "alpha: must be above 0, got -1"),
        ("adapter={kind: lora, dropout: 1.5}", "dropout: must be below 1, got 1.5"),
        ("adapter={kind: lora, layers: '('}", "layers: is no regular expression"),
        ("adapter={kind: prefix, tokens: 0}", "tokens: must be at least 1, got 0"),
        ("adapter={kind: prefix, projection_width: -1}", "projection_width: must be at least 0"),
        ("adapter={rank: 0}", "rank: must be at least 1, got 0"),  # LoRA is meant, though not named
        ("adapter.rank=1000000000", "rank: must be at most 65,536"),
    ],
)
def test_an_adapter_out_of_range_is_one_line(refusal, adapter, why):
    (line,) = refusal("sft", adapter).splitlines()
    assert line.startswith(f"error: override: adapter.{why}")


@pytest.mark.parametrize(
    ("verb", "setting", "key"),
    [
        ("ppo", "kl_coef=-0.1", "kl_coef"),
        ("ppo", "kl_target=-6", "kl_target"),
        ("ppo", "kl_target=0", "kl_target"),
        ("ppo", "clip_range=0", "clip_range"),
        ("ppo", "clip_range_high=0", "clip_range_high"),
        ("ppo", "dual_clip=1.1", "dual_clip"),
        ("ppo", "entropy_coef=-0.01", "entropy_coef"),
        ("ppo", "target_kl=0", "target_kl"),
        ("ppo", "kl_in=loss", "kl_in"),
        ("ppo", "advantages=rloo", "advantages"),
        ("ppo", "value_coef=0", "value_coef"),
        ("ppo", "value_coef=1", "value_coef"),
        ("ppo", "value_warmup_steps=-1", "value_warmup_steps"),
        ("ppo", "responses_per_prompt=0", "responses_per_prompt"),
        ("ppo", "missing_end_penalty=-1", "missing_end_penalty"),
        ("ppo", f"max_new_tokens={10**12}", "max_new_tokens"),
        ("sft", "training.seed=-1", "seed"),
        ("sft", f"training.seed={2**70}", "seed"),
        ("sft", "training.epochs=1e308", "epochs"),
        ("sft", f"training.max_steps={HUGE}", "max_steps"),
        ("sft", f"training.batch_size={10**12}", "batch_size"),
        ("sft", f"training.micro_batch_tokens={HUGE}", "micro_batch_tokens"),
        ("sft", f"data.max_rows={HUGE}", "max_rows"),
        ("sft", "training.epochs=.nan", "epochs"),
        ("sft", "training.max_steps=.inf", "max_steps"),
        ("sft", "optim={learning_rate: 1e-4, eps: 1e-320}", "eps"),
        ("sft", "optim={learning_rate: 1e-4, betas: [0.9, .nan]}", "betas"),
        ("sft", "optim={learning_rate: 2e4}", "learning_rate"),
        ("sft", "optim={learning_rate: 1e-4, momentum: 1.0, name: sgd}", "momentum"),
        ("sft", "optim={learning_rate: 1e-4, momentum: 0.9}", "momentum"),
        ("sft", "optim={learning_rate: 1e-4, name: sgd, eps: 1e-5}", "eps"),
        ("sft", "optim={learning_rate: 1e-4, schedule: wsd, decay_ratio: 1.5}", "decay_ratio"),
        ("sft", "optim={learning_rate: 1e-4, decay_ratio: 0.2}", "decay_ratio"),
        ("sft", "optim={learning_rate: 1e-4, schedule: wsd, decay_ratio: 0.9, warmup_ratio: 0.2}", "warmup_ratio"),
        ("sft", "optim={learning_rate: 1e-4, schedule: inverse_sqrt, timescale: 0}", "timescale"),
        ("sft", "optim={learning_rate: 1e-4, schedule: inverse_sqrt, min_learning_rate_ratio: 0.1}", "min_learning_rate_ratio"),
        ("sft", "optim={learning_rate: 1e-4, learning_rates: {'(': 2}}", "learning_rates"),
        ("sft", "optim={learning_rate: 1e-4, learning_rates: {head: 0}}", "head"),
        ("sft", "optim={learning_rate: 0.1, learning_rates: {lora_B: 16}}", "learning_rate"),
        ("pretrain", "objective={kind: infilling, density: -1}", "density"),
        ("pretrain", "objective={kind: span_corruption, mean_span: 0}", "mean_span"),
        ("pretrain", f"objective={{kind: masked, masking: {{longest_span: {10**12}}}}}", "longest_span"),
        ("pretrain", "sentinels=-1", "sentinels"),
        ("winrate", "temperature=-1", "temperature"),
        ("winrate", "top_p=0", "top_p"),
        ("winrate", "seed=-1", "seed"),
        ("winrate", "batch_size=0", "batch_size"),
        ("winrate", "max_new_tokens=0", "max_new_tokens"),
        ("winrate", "tie_margin=-0.5", "tie_margin"),
    ],
)  # fmt: skip
def test_a_number_that_no_run_can_have_is_one_line(refusal, verb, setting, key):
    (line,) = refusal(verb, setting).splitlines()
    assert re.match(rf"error: override: .*\b{key}\b", line)


@pytest.mark.parametrize(("key", "value"), [("name", "adamax"), ("schedule", "wave"), ("decay_type", "steep")])
def test_an_unknown_optimizer_or_schedule_is_answered_with_the_known_ones(refusal, key, value):
    message = refusal("sft", f"optim={{learning_rate: 1e-4, {key}: {value}}}")
    known = {"name": "paged_adamw_8bit", "schedule": "inverse_sqrt", "decay_type": "1-sqrt"}[key]
    assert f"optim.{key}" in message and known in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_value_optimizer_that_cannot_run_is_refused_before_any_model_is_looked_for(refusal):
    line = refusal("ppo", "value_optim={learning_rate: 1e-6, name: paged_adamw_8bit}")
    assert line.startswith("error: optim.name paged_adamw_8bit ")


def test_a_controlled_kl_needs_a_coefficient_to_start_from(refusal):
    assert "kl_coef: must be above 0 where kl_target is set" in refusal("ppo", "kl_coef=0", "kl_target=6")


def test_a_large_eps_makes_a_large_learning_rate_plain_gradient_descent():
    from alignment.training import OptimConfig

    OptimConfig(learning_rate=1e6, eps=1e6)
    with pytest.raises(ValueError, match="learning_rate must be at most 1"):
        OptimConfig(learning_rate=1e6, eps=1e-8)


def test_a_mistyped_section_is_blamed_on_the_override_that_makes_it(refusal):
    assert refusal("sft", "optm.learning_rate=1e-4") == (
        "error: override: optm: unknown key; did you mean 'optim'?\n"
    )  # fmt: skip


def test_what_a_section_says_of_an_overridden_key_is_blamed_on_the_override(refusal):
    assert refusal("winrate", "baseline=b").startswith("error: override: baseline: 'b' is not among the models")


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        ("lr=1e-4", "here it is called optim.learning_rate"),
        ("lora_r=8", "here it is called adapter.rank"),
        ("per_device_train_batch_size=4", "here it is called training.batch_size (rows per update over all devices)"),
        ("batch_size=4", "here it is called training.batch_size"),
        ("num_train_epochs=3", "here it is called training.epochs"),
        ("load_in_4bit=true", "here it is called weights.quantize=nf4"),
        ("load_in_8bit=true", "here it is called weights.quantize=int8"),
        ("quantization=4bit", "here it is called weights.quantize (nf4 or int8)"),
        ("quantize=nf4", "here it is called weights.quantize (nf4 or int8)"),
        ("data.epochs=3", "here it is called training.epochs"),
    ],
)
def test_keys_of_other_programs_and_sections_are_told_what_they_are_called_here(refusal, setting, advice):
    name = setting.partition("=")[0]
    assert refusal("sft", setting).splitlines()[0] == f"error: override: {name}: unknown key; {advice}"


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        ("num_generations=8", "here it is called responses_per_prompt"),
        ("beta=0.04", "here it is called kl_coef"),
        ("max_completion_length=64", "here it is called max_new_tokens"),
    ],
)
def test_keys_of_grpo_elsewhere_are_told_what_they_are_called_here(refusal, setting, advice):
    assert advice in refusal("ppo", setting)


def test_the_loss_of_dpo_is_known_by_its_own_name():
    from alignment.algorithms.dpo import DPOConfig
    from alignment.data.config import DataConfig

    [loss] = DPOConfig("p", DataConfig(train="t"), "o", loss="dpo").losses
    assert loss.name == "sigmoid"


def test_every_key_that_another_program_s_name_leads_to_exists():
    from alignment.config.problems import KEYS_OF_OTHER_LIBRARIES, has_key

    classes = [find_stage(verb)[0] for verb in ("pretrain", "sft", "reward", "dpo", "ppo")]
    for ours in KEYS_OF_OTHER_LIBRARIES.values():
        key = tuple(re.split("[ =]", ours)[0].split("."))
        assert any(has_key(cls, key) for cls in classes), ours


def test_the_wrong_values_of_all_sections_are_told_at_once(refusal):
    wrong = [
        "optim.learning_rate=-1", "optim.eps=-2", "training.epochs=-3", "training.batch_size=-4", "data.max_length=-5",
        "neftune_alpha=-6", "trainig.epochs=2", "training.seed=many", "optim.weight_decay=-7", "data.train=none.jsonl",
    ]  # fmt: skip
    told = "\n".join(sorted(refusal("sft", *wrong).removeprefix("error: ").splitlines()))
    keys = ["neftune_alpha", "max_length", "train: none.jsonl", "eps", "learning_rate", "weight_decay"]
    for key in [*keys, "batch_size", "epochs", "seed", "trainig: unknown key"]:
        assert len(re.findall(rf"^override: .*\b{key}", told, re.MULTILINE)) == 1, told
    assert len(told.splitlines()) == len(wrong), told


def limits(cls: type, document: SourcedYaml) -> set[str]:
    """What a stage says of the limits of its keys, without where they were set and without the value."""
    with pytest.raises(UserError) as caught:
        build(cls, document)
    told = (line.partition(", got ")[0].partition(": ")[2] for line in str(caught.value).splitlines())
    return {line for line in told if " must " in line}


@pytest.mark.parametrize("verb", ["sft", "reward", "dpo", "ppo", "pretrain", "winrate", "language", "reward_eval"])
def test_every_number_that_is_refused_alone_is_refused_beside_all_others(verb, monkeypatch):
    monkeypatch.setattr("alignment.config.load.raise_all", partial(raise_all, cap=1000))
    cls, good = find_stage(verb)[0], parse_yaml(GOOD[verb], "run.yaml")
    keys = [key.name for key in config_keys(cls) if re.search("integer|number", key.type) and "{" not in key.name]
    wrong = [f"{key}=-7" for key in keys if "[" not in key]
    alone = set()
    for each in wrong:
        try:
            build(cls, override(good, [each]))
        except UserError:
            alone |= limits(cls, override(good, [each]))
    assert len(alone) >= 7  # those of data
    assert alone == limits(cls, override(good, wrong))


@pytest.mark.parametrize(
    ("verb", "setting"),
    [
        ("reward", ["loss=rao_kuper", "theta=3.0"]),  # theta has an effect with the loss that was meant
        ("sft", ["optim.name=adamv", "optim.learning_rate=1e-3", "optim.momentum=0.5"]),
        ("sft", ["training.max_steps=-1", "training.epochs=null"]),  # the run would have an end
        ("winrate", ["judge=reward-model", "reward_model=./nowhere"]),
        ("pretrain", ["tokenizer_kind=byte", "policy=null", "model={model_type: llama}"]),
        ("ppo", ["kl_target=-6", "kl_coef=0"]),
    ],
)
def test_a_wrong_value_is_the_only_one_told_where_others_depend_on_it(refusal, verb, setting):
    (line,) = refusal(verb, *setting).splitlines()
    assert setting[0].partition("=")[0].rpartition(".")[2] in line


def test_fp16_is_refused_with_the_reason(refusal):
    assert "fp16 loses small gradients unless the loss is scaled" in refusal("sft", "training.precision=fp16")
