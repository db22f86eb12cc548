"""Numbers no run can have and keys of other programs: code 2 and one line each, all at once, before any model is looked for."""

import re
from functools import partial

import pytest
import torch

from alignment.cli import main
from alignment.config.load import build
from alignment.config.schema import config_keys, packaged_schema
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
        ("adapter={kind: lora, dropout: 1.5}", "dropout: must be below 1, got 1.5"),
        ("adapter={kind: lora, layers: '('}", "layers: pattern '(' is no regular expression"),
        ("adapter={kind: prefix, tokens: 0}", "tokens: must be at least 1, got 0"),
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
        ("ppo", "kl_target=0", "kl_target"),
        ("ppo", "dual_clip=1.1", "dual_clip"),
        ("ppo", "kl_in=loss", "kl_in"),
        ("ppo", "advantages=rloo", "advantages"),
        ("ppo", "value_coef=1", "value_coef"),
        ("ppo", f"max_new_tokens={10**12}", "max_new_tokens"),
        ("sft", f"training.seed={2**70}", "seed"),
        ("sft", "training.epochs=1e308", "epochs"),
        ("sft", f"training.max_steps={HUGE}", "max_steps"),
        ("sft", "training.epochs=.nan", "epochs"),
        ("sft", "training.max_steps=.inf", "max_steps"),
        ("sft", "optim={learning_rate: 1e-4, eps: 1e-320}", "eps"),
        ("sft", "optim={learning_rate: 1e-4, betas: [0.9, .nan]}", "betas"),
        ("sft", "optim={learning_rate: 2e4}", "learning_rate"),
        ("sft", "optim={learning_rate: 1e-4, momentum: 0.9}", "momentum"),
        ("sft", "optim={learning_rate: 1e-4, name: sgd, eps: 1e-5}", "eps"),
        ("sft", "optim={learning_rate: 1e-4, decay_ratio: 0.2}", "decay_ratio"),
        ("sft", "optim={learning_rate: 1e-4, schedule: wsd, decay_ratio: 0.9, warmup_ratio: 0.2}", "warmup_ratio"),
        ("sft", "optim={learning_rate: 1e-4, schedule: inverse_sqrt, min_learning_rate_ratio: 0.1}", "min_learning_rate_ratio"),
        ("sft", "optim={learning_rate: 1e-4, learning_rates: {'(': 2}}", "learning_rates"),
        ("sft", "optim={learning_rate: 1e-4, learning_rates: {head: 0}}", "head"),
        ("sft", "optim={learning_rate: 0.1, learning_rates: {lora_B: 16}}", "learning_rate"),
        ("pretrain", "objective={kind: infilling, density: -1}", "density"),
        ("pretrain", f"objective={{kind: masked, masking: {{longest_span: {10**12}}}}}", "longest_span"),
        ("winrate", "temperature=-1", "temperature"),
        ("winrate", "tie_margin=-0.5", "tie_margin"),
        ("ppo", "kl_coef=0 kl_target=6", "kl_coef"),
        ("sft", "optim={learning_rate: 1e-4,name: adamax}", "paged_adamw_8bit"),
    ],
)  # fmt: skip
def test_a_number_that_no_run_can_have_is_one_line(refusal, verb, setting, key):
    (line,) = refusal(verb, *(setting.split() if "{" not in setting else [setting])).splitlines()
    assert re.match(rf"error: override: .*\b{key}\b", line)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_value_optimizer_that_cannot_run_is_refused_early(refusal):
    line = refusal("ppo", "value_optim={learning_rate: 1e-6, name: paged_adamw_8bit}")
    assert line.startswith("error: optim.name paged_adamw_8bit ")


def test_a_large_eps_makes_a_large_learning_rate_plain_gradient_descent():
    from alignment.training import OptimConfig

    OptimConfig(learning_rate=1e6, eps=1e6)
    with pytest.raises(ValueError, match="learning_rate must be at most 1"):
        OptimConfig(learning_rate=1e6, eps=1e-8)


def test_a_mistyped_section_is_blamed_on_the_override_that_makes_it(refusal):
    assert refusal("sft", "optm.learning_rate=1e-4") == (
        "error: override: optm: unknown key; did you mean 'optim'?\n"
    )  # fmt: skip


def test_a_complaint_about_an_overridden_key_blames_the_override(refusal):
    assert refusal("winrate", "baseline=b").startswith("error: override: baseline: 'b' is not among the models")


@pytest.mark.parametrize(
    ("verb", "setting", "advice"),
    [
        ("sft", "lr=1e-4", "optim.learning_rate"),
        ("sft", "per_device_train_batch_size=4", "training.batch_size (rows per update over all devices)"),
        ("sft", "batch_size=4", "training.batch_size"),
        ("sft", "load_in_4bit=true", "weights.quantize=nf4"),
        ("sft", "quantize=nf4", "weights.quantize (nf4 or int8)"),
        ("sft", "data.epochs=3", "training.epochs"),
        ("ppo", "num_generations=8", "responses_per_prompt"),
        ("ppo", "beta=0.04", "kl_coef"),
        ("ppo", "max_completion_length=64", "max_new_tokens"),
        ("ppo", "loss_type=dr_grpo", "loss_normalization"),
        ("dpo", "loss_type=ipo", "loss"),
        ("ppo", "max_epochs=2", "epochs"),
        ("sft", "max_epochs=2", "training.epochs"),
        ("sft", "load_in_8bit=true", "weights.quantize=int8"),
        ("sft", "fp16=true", "training.precision (bf16 or fp32; there is no fp16)"),
        ("sft", "cutoff_len=512", "data.max_length"),
        ("sft", "sequence_len=512", "data.max_length"),
        ("sft", "template=llama3", "chat_template"),
        ("sft", "finetuning_type=lora", "adapter.kind (lora; without an adapter every weight trains)"),
        ("sft", "num_train_epochs=2", "training.epochs"),
        ("ppo", "use_vllm=true", "servers.urls"),
    ],
)
def test_keys_of_other_programs_get_their_names_here(refusal, verb, setting, advice):
    said = f"error: override: {setting.partition('=')[0]}: unknown key; here it is called {advice}"
    assert refusal(verb, setting).splitlines()[0] == said


@pytest.mark.parametrize("setting", ["packing=true", "flash_attn=fa2", "deepspeed=zero3.json", "logging_steps=1"])
def test_keys_that_are_not_needed_here_are_told_why(refusal, setting):
    assert f"{setting.partition('=')[0]}: unknown key; there is none here: " in refusal("sft", setting)


def test_every_key_that_another_program_s_name_leads_to_exists():
    from alignment.config.load import KEYS_OF_OTHER_LIBRARIES, has_key

    classes = [find_stage(verb)[0] for verb in ("pretrain", "sft", "reward", "dpo", "ppo")]
    for ours in "|".join(KEYS_OF_OTHER_LIBRARIES.values()).split("|"):
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


@pytest.mark.parametrize("verb", GOOD)
def test_every_number_that_is_refused_alone_is_refused_beside_all_others(verb, monkeypatch):
    monkeypatch.setattr("alignment.config.load.raise_all", partial(raise_all, cap=1000))
    cls, good = find_stage(verb)[0], parse_yaml(GOOD[verb], "run.yaml")
    keys = [
        key.name
        for key in config_keys(packaged_schema(verb))
        if re.search("integer|number", key.type) and "{" not in key.name
    ]
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
