"""README.md of a trained model: its card for the Hugging Face Hub, made of what the run's directory says.

Paths are cut to their last two parts, since a card is published. Nothing is asked of a server.
"""

import json
import math
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from huggingface_hub import ModelCardData, metadata_load, try_to_load_from_cache
from jinja2 import StrictUndefined, Template

from alignment.adapters.files import is_adapter, read_adapter_config
from alignment.config.schema import config_keys, packaged_schema
from alignment.config.yaml_source import read_yaml
from alignment.data.rows.files import hub_source
from alignment.files import CARD, hash_of, read_json_object, write_text
from alignment.reports.html import TEMPLATES, format_cell, format_share
from alignment.reports.page import HELD_OUT, MAIN, OVEROPTIMIZATION, flatten_settings
from alignment.reports.run_log import read_log_rows
from alignment.settings import leaves
from alignment.training.run.lineage import directory_hash, without_runtime_keys

Config = Mapping[str, Any]
NOTED = re.compile(r"(train|evaluation) [\w -]+: (?!prepared into|read from)|model/ holds ")  # notes of a run
ABSOLUTE = re.compile(r"(?<![\w./:~-])/(?:[^\s/,()]+/)*([^\s/,()]+/[^\s/,()]+)")
CLASSES = {  # ending of the class that opens a model, by peft's task type, and by ours where they differ
    "CAUSAL_LM": "CausalLM",
    "SEQ_2_SEQ_LM": "Seq2SeqLM",
    "SEQ_CLS": "SequenceClassification",
    "TOKEN_CLS": "TokenClassification",
    "QUESTION_ANS": "QuestionAnswering",
    "FEATURE_EXTRACTION": "FeatureExtraction",
}


def write_card(run: Path) -> None:
    """Write `model/README.md` of a training run; one that a user wrote or edited stays as it is."""
    path = run / "model" / CARD
    text = card_text(run)
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    if before in ("", _marked(before.rpartition("\n<!--")[0])):
        write_text(path, _marked(text))


def _marked(text: str) -> str:
    """A card with the line that tells an edited one."""
    return (
        f"{text}\n<!-- card {hash_of(text)[:16]}: one that was edited is kept; delete the file to get a new one -->\n"
    )


def card_text(run: Path) -> str:
    """The card of a run's model, without its mark."""
    lineage = read_json_object(run / "lineage.json")
    config = read_yaml(run / "config.yaml").values or {}
    ancestors = list(_ancestors(run))
    datasets = sorted(_hub_datasets(config))
    starts = {name: digest for name, digest, is_start in ancestors if is_start}
    kinds = dict.fromkeys(starts, "model") | dict.fromkeys(datasets, "dataset")
    licenses = sorted(
        {str(license_name) for name, kind in kinds.items() if (license_name := _metadata(name, kind).get("license"))}
    )
    library, auto = _loader(run / "model")
    adapter = (config.get("adapter") or {}).get("kind")
    metadata = ModelCardData(
        # A directory has a SHA-256, of 64 digits; what the Hub has is known by its commit, or not.
        base_model=next((name for name, digest in [*starts.items()][-1:] if len(digest) < 64), None),
        library_name=library,
        license=licenses[0] if len(licenses) == 1 else None,
        tags=["alignment", lineage["stage"], *([adapter] if adapter else [])],
        datasets=datasets or None,
    )
    template = (TEMPLATES / "card.md.jinja").read_text(encoding="utf-8")
    return Template(template, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).render(
        metadata=metadata.to_yaml(),
        title=run.resolve().name,
        adapter=adapter if library == "peft" else None,
        lineage=lineage,
        start=next(iter(starts), None),
        library=library,
        auto=auto,
        values={".".join(map(str, key)): leaf for key, leaf in leaves(config)},
        datasets=datasets,
        licenses=licenses,
        notes=[note for note in lineage.get("notes", []) if NOTED.match(note)],
        settings=_changed_settings(lineage["stage"], config),
        metrics=list(_headlines(run)),
        win_rates=list(_win_rates(run)),
        parents=dict.fromkeys((name, digest) for name, digest, _ in ancestors),
        shortened=shortened,
    )


def shortened(text: str) -> str:
    """A text in one line for a table, whose absolute paths are cut to their last two parts."""
    short = "/".join(Path(text).parts[-2:]) if os.path.isabs(text) else ABSOLUTE.sub(r"\1", text)
    return textwrap.shorten(short, 300, placeholder=" ...").replace("|", r"\|")


def _ancestors(run: Path, seen: frozenset[Path] = frozenset()) -> Iterator[tuple[str, str, bool]]:
    """Name and hash of each checkpoint behind a run, and whether the weights come from it; the nearest first."""
    if run.resolve() in seen or not (run / "lineage.json").is_file() or not (run / "config.yaml").is_file():
        return  # no run wrote it, or a later run of the same name did
    policy = (read_yaml(run / "config.yaml").values or {}).get("policy")
    for name, digest in read_json_object(run / "lineage.json")["parents"].items():
        yield name, str(digest or ""), name == policy
        if (path := Path(name).expanduser()).is_dir():
            for further, hashed, is_start in _ancestors(path.parent, seen | {run.resolve()}):
                yield further, hashed, is_start and name == policy


def _metadata(name: str, kind: str) -> Config:
    """The metadata of the card of a directory, or in the Hub's cache on this machine; {} where there is none."""
    with suppress(Exception):  # others wrote it, or nobody
        directory = Path(name).expanduser()
        path = directory / CARD if directory.is_dir() else try_to_load_from_cache(name, CARD, repo_type=kind)
        return metadata_load(cast(Path, path)) or {}
    return {}


def _loader(model: Path) -> tuple[str, str]:
    """The library that opens a model and its class there."""
    if is_adapter(model):
        return "peft", f"AutoPeftModelFor{CLASSES[read_adapter_config(model)['task_type']]}"
    if not (model / "config.json").is_file():
        return "alignment", "load_reward_model"  # an ensemble of adapters
    task = (read_json_object(model / "config.json").get("architectures") or [""])[0].partition("For")[2] or "CausalLM"
    return "transformers", f"AutoModelFor{task.replace('ConditionalGeneration', 'Seq2SeqLM')}"


def _hub_datasets(config: Config) -> set[str]:
    """Names of the Hub data sets whose rows were read."""
    rows = {"train", "evaluation"}  # the keys of sources, which may be a list of names or of sections
    keyed = ((key, leaf) for key, leaf in leaves(config) if rows & {*key} and key[-1] in {*rows, "source", *range(999)})
    names = (leaf for _, leaf in keyed if isinstance(leaf, str) and not os.path.exists(leaf))
    return {source[0] for name in names if (source := hub_source(name, ""))}


def _changed_settings(stage: str, config: Config) -> dict[str, str]:
    """Values that differ from their defaults, by dotted key."""
    keys = {re.sub(r"\{.*?\}|\[\]", "", key.name): key.default or "null" for key in config_keys(packaged_schema(stage))}
    given = flatten_settings(without_runtime_keys(config))
    return {key: value for key, value in given if value != str(json.loads(keys.get(key, "null")))}


def _headlines(run: Path) -> Iterator[tuple[str, str, int]]:
    """The last value of each main metric, at the weights that the model has, and its update."""
    rows = read_log_rows(run / "metrics.jsonl")
    end = rows[-1].get("best_step", math.inf)
    latest = {name: (value, row["step"]) for row in rows if row["step"] <= end for name, value in row.items()}
    names = dict.fromkeys(prefix + name for name in (*MAIN, *OVEROPTIMIZATION) for prefix in (HELD_OUT, ""))
    yield from ((name, format_cell(latest[name][0]), latest[name][1]) for name in names if name in latest)


def _win_rates(run: Path) -> Iterator[Config]:
    """The win rates of the model in evaluations that lie beside the run; models are known by their content."""
    results = [path for path in sorted(run.parent.glob("*/results.json")) if path.with_name("sampling.json").is_file()]
    model_hash = directory_hash(run / "model") if results else ""
    for path in results:
        evaluation = read_json_object(path)
        for name, digest in read_json_object(path.with_name("sampling.json"))["models"].items():
            judged = evaluation["models"].get(name, evaluation["models"].get(name.rpartition(", seed ")[0], {}))
            if digest == model_hash and (rate := judged.get("win_rate")):
                yield {**evaluation, "share": format_share(rate), "seeds": rate.get("seeds")}
