"""The command `alignment init`: configs for a base, files of rows and a card, from packaged ones that fit.

Of three packaged configs of a stage (every weight, LoRA, LoRA over a base in NF4) the first whose plan fits the card
gives the values; lengths, batch size, the held-out prompts and the use of the chat template come from the rows.
Comments in a config say why.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import yaml

from alignment.config.load import build, find_packaged
from alignment.config.yaml_source import SourcedYaml, read_yaml
from alignment.data.config import DataConfig
from alignment.data.prepare import held_out, prepare
from alignment.data.rows.read import read_rows
from alignment.data.rows.records import Kind
from alignment.data.table import column_of
from alignment.errors import UserError
from alignment.files import write_text
from alignment.loading import load_tokenizer
from alignment.pipeline.stages import find_stage
from alignment.planning.layout import Device, Layout, find_device
from alignment.planning.plan import make_plan
from alignment.planning.stages import find_start
from alignment.ragged import has_bfloat16

KINDS: tuple[Kind, ...] = ("comparisons", "demonstrations", "prompts")  # rows of one kind may pass as a later one
NEEDS: dict[str, tuple[Kind, ...]] = {  # stage -> kinds of rows that must be given, its own first
    "sft": ("demonstrations",),
    "dpo": ("comparisons",),
    "reward": ("comparisons", "prompts"),
    "ppo": ("prompts", "comparisons"),
}
VARIANTS = {"qwen3_8b_8x80gb": "every weight", "qwen3_0.6b": "LoRA", "qwen3_8b_24gb": "LoRA over NF4"}
SHARES = (0.02, 0.05, 0.1, 0.2)  # of prompts that are held out
HELD_OUT = 50  # rows that should be at least
NEW_TOKENS = 512  # of a response at most
# of an epoch, where it has rows enough for batches of so many
LEAST_UPDATES = 16
LEAST_ROWS = 8

Values = dict[str, Any]


class DataSection(NamedTuple):
    """The section `data` for rows of a kind, the hash of each row's prompt, and the reason for its length."""

    values: Values
    hashes: np.ndarray
    note: str


def write_configs(
    base: str,
    files: Sequence[str],
    gpu_memory: float | None,
    folder: Path,
    columns: dict[str, str],
    *,
    lora: bool = False,
) -> list[str]:
    """Write the configs that the rows allow into a folder; returns the commands that run them, in order.

    Demonstrations give SFT; comparisons DPO; comparisons and prompts a reward model and PPO as well.

    Args:
        base: directory or Hub name of the model to start from.
        files: of rows, whose kinds are recognized.
        gpu_memory: of one GPU, 10^9 bytes; None: that of the GPU here, else this machine's processor.
        columns: our name of a column -> the files'.
        lora: train LoRA even where every weight fits.
    """
    kinds = {file: kind_of(file, columns) for file in files}
    device = find_device(gpu_memory, None, "bf16", None)
    stages = stages_of(kinds, folder)
    config = find_start(base).config
    positions = int(config.get("max_position_embeddings") or config.get("n_positions") or 2048)
    new_tokens = min(NEW_TOKENS, positions // 4)
    data: dict[Kind, DataSection] = {}
    for kind in KINDS:
        if of_kind := [file for file in files if kinds[file] == kind]:
            data[kind] = data_section(base, kind, of_kind, positions - new_tokens * (kind == "prompts"), columns)
    judged_on = add_held_out(data)
    policy = f"{folder}/sft/model" if "sft" in stages else base
    configs: dict[str, Values] = {}
    notes = {"winrate": [judged_on]}
    with TemporaryDirectory() as draft:  # a plan finds there which config writes the model that it starts from
        for stage in stages:
            section = data[NEEDS[stage][0]]
            start = base if stage == "sft" else policy
            changes: Values = {"output": f"{folder}/{stage}", "policy": start, "data": section.values}
            if stage == "ppo":
                changes |= {"reward_model": f"{folder}/reward/model", "max_new_tokens": new_tokens}
            rows = len(section.hashes)
            configs[stage], reasons = fitting_values(stage, changes, rows, device, near=Path(draft), lora=lora)
            notes[stage] = [*reasons, section.note, judged_on]
            write_yaml(Path(draft), stage, configs[stage])
    asked = next((section for section in [*data.values()][::-1] if has_prompts(section, columns)), [*data.values()][-1])
    configs["winrate"] = winrate_values(base, stages, folder, asked, columns) | {"max_new_tokens": new_tokens}
    for stage, values in configs.items():
        write_yaml(folder, stage, values, notes[stage])
    return [
        *(f"alignment {stage} {folder}/{stage}.yaml" for stage in stages),
        f"alignment evaluate winrate {folder}/winrate.yaml",
    ]


def winrate_values(
    base: str, stages: Sequence[str], folder: Path, asked: DataSection, columns: Mapping[str, str]
) -> Values:
    """The config that compares the base and every policy on the prompts of a section, judged by people."""
    trained = {stage: f"{folder}/{stage}/model" for stage in stages if stage != "reward"}
    return {
        "output": f"{folder}/winrate",
        "models": {"base": base} | trained,
        "baseline": "sft" if "sft" in stages else "base",
        "judge": "verdicts",
        "verdicts": f"{folder}/verdicts.jsonl",
        "data": asked.values | ({"columns": {"prompt": columns.get("prompt", "prompt")}} if columns else {}),
    }


def stages_of(kinds: Mapping[str, str], folder: Path) -> list[str]:
    """The stages that rows of these kinds (by file) allow; UserError where there are none, or a config is there."""
    stages = [stage for stage, needed in NEEDS.items() if {*needed} <= {*kinds.values()}]
    if not stages:
        raise UserError(f"{', '.join(kinds)}: only {', '.join(kinds.values())}; give rows to train on as well")
    names = [f"{stage}.yaml" for stage in (*stages, "winrate")]
    if there := [name for name in names if (folder / name).exists()]:
        raise UserError(f"{folder}: holds {', '.join(there)}; nothing was changed, choose another folder")
    return stages


def write_yaml(folder: Path, stage: str, values: Values, notes: Sequence[str] = ()) -> None:
    """Write the config of a stage below comments."""
    comments = "".join(f"# {note}\n" for note in notes)
    write_text(folder / f"{stage}.yaml", comments + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def has_prompts(section: DataSection, columns: dict[str, str]) -> bool:
    """True where rows can be answered: a dialogue that ends with the assistant's message cannot."""
    with suppress(UserError):
        read_rows(section.values["train"][0], "prompts", columns=columns, max_rows=1)
        return True
    return False


def add_held_out(data: Mapping[Kind, DataSection]) -> str:
    """Hold the same prompts out in all sections of rows, and say how many.

    The share is the smallest that leaves `HELD_OUT` in each, or else the largest that is tried.
    """
    hashes = [section.hashes for section in data.values()]
    enough = (
        share for share in SHARES if min(held_out(section_hashes, share).sum() for section_hashes in hashes) >= HELD_OUT
    )
    share = next(enough, SHARES[-1])
    chosen = {kind: held_out(section.hashes, share) for kind, section in data.items()}
    if any(out.all() or not out.any() for out in chosen.values()):
        return "no prompts are held out, there are too few: the win rate is one on training prompts"
    for section in data.values():
        section.values["evaluation_share"] = share
    counts = ", ".join(f"{out.sum():,} of {len(out):,} rows of {kind}" for kind, out in chosen.items())
    return f"data.evaluation_share: {counts} have prompts that no stage trains on; the win rate is on those alone"


def kind_of(file: str, columns: dict[str, str]) -> Kind:
    """The kind of a file's rows, by its columns; UserError where none of `NEEDS` fits."""
    for kind in KINDS:
        with suppress(UserError):
            read_rows(file, kind, columns=columns, max_rows=1, on_bad_row="skip")
            return kind
    raise UserError(
        f"{file}: no rows of {', '.join(KINDS)}; `alignment data check {file} --kind KIND` says what is missing; give "
        "--columns OURS=THEIRS for columns of other names"
    )


def data_section(base: str, kind: Kind, files: Sequence[str], most: int, columns: dict[str, str]) -> DataSection:
    """The section `data` for some files, whose rows have `most` tokens at most.

    Its length is that of the longest row, or, where few rows are much longer than the others, of 99 % of them. Prompts
    that are plain text go through the chat template, where the base has one.
    """
    tokenizer = load_tokenizer(base)
    [first], _ = read_rows(files[0], kind, columns=columns, max_rows=1, on_bad_row="skip")
    plain = isinstance(getattr(first, "prompt", None), str) and getattr(first, "messages", None) is None
    section: Values = {"train": list(files), **({"columns": columns} if columns else {})}
    section |= {"as_messages": True} if plain and tokenizer.chat_template else {}
    examples, _ = prepare(DataConfig(**section, max_length=most, max_cut_share=1), kind, tokenizer)
    lengths = column_of(examples, "longest")
    longest = int(lengths.max())
    usual = int(np.quantile(lengths, 0.99, method="higher"))
    length = longest if longest <= 1.25 * usual else usual
    cut = int((lengths > length).sum())
    note = f"data.max_length: the longest row has {longest:,} tokens; {cut:,} of {len(lengths):,} rows are cut"
    return DataSection(section | {"max_length": length}, column_of(examples, "prompt_hash"), note)


def fitting_values(
    stage: str, changes: Values, rows: int, device: Device, *, near: Path, lora: bool = False
) -> tuple[Values, list[str]]:
    """The values of the first packaged config, with changes, whose plan fits the device, and the reasons for them.

    UserError where none fits. Rates for every weight are those of an 8B model: smaller ones take larger steps.
    """
    for variant, trained in [*VARIANTS.items()][lora:]:
        packaged = read_yaml(find_packaged(f"{stage}/{variant}", "configs")).values
        settings = packaged["training"]
        gpu = device.gpu
        training = {
            "epochs": settings.get("epochs", 1),
            "batch_size": min(settings["batch_size"], max(LEAST_ROWS, rows // LEAST_UPDATES)),
            "micro_batch_tokens": settings["micro_batch_tokens"],
            "gradient_checkpointing": gpu,
            "precision": "bf16" if gpu or has_bfloat16() else "fp32",
        }
        # Without the text beside PPO, and without the type of a reference on eight cards.
        kept = {
            key: value for key, value in packaged.items() if "pretrain" not in key and value != {"dtype": "bfloat16"}
        }
        values = {**kept, **changes, "training": training}
        config = build(find_stage(stage)[0], SourcedYaml(values))
        plan = make_plan(config, Layout(), device, near=near)
        if plan.fits is False:
            continue
        factor = 1.0 if "adapter" in values else max(1.0, math.sqrt(8e9 / plan.roles[0].parameters))
        for name in ("optim", "value_optim"):
            if name in values:
                rate = float(f"{factor * float(values[name]['learning_rate']):.1g}")
                values[name] = {**values[name], "learning_rate": rate}
        return values, [
            f"{trained} trains: the first of {', '.join(VARIANTS.values())} that fits {device.name}, or is asked for",
            f"optim.learning_rate: usual for that; of every weight times the root of 8B/parameters, here {factor:.2g}",
            "training.precision: bf16 on a GPU and on a processor with instructions for bfloat16, fp32 on others",
            f"training.batch_size: at least {LEAST_UPDATES} updates an epoch, where that leaves {LEAST_ROWS} rows",
        ]
    raise UserError(f"{stage}: none of {', '.join(VARIANTS)} fits with this base on {device.name}; take a smaller base")
