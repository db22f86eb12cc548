"""The keys of every stage with type, default and meaning: in the JSON schema, and in the help of the commands."""

import json
import subprocess
import sys
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import pytest

from alignment import cli
from alignment.config.load import build, load_config, packaged_folder
from alignment.config.schema import ConfigKey, config_keys, packaged_schema
from alignment.config.yaml_source import SourcedYaml
from alignment.pipeline.stages import STAGES, find_stage

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from schemas import attribute_texts, schema_of  # noqa: E402


@dataclass(frozen=True)
class Base:
    """A base.

    Attributes:
        rate: of the base,
            in two lines.
        low, high: bounds.
    """

    rate: float = 0.5
    low: int = 1
    high: int | None = None


@dataclass(frozen=True)
class Tree:
    """A kind of section.

    Attributes:
        depth: levels.
        seed: of both kinds.
    """

    kind: Literal["tree"] = "tree"
    depth: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Forest:
    """Another.

    Attributes:
        trees: how many.
        seed: of both kinds.
    """

    kind: Literal["forest"] = "forest"
    trees: int = 10
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Settings.

    Attributes:
        name: of the run.
        model: what is fitted.
        parts: sections in a list.
        mode: one of two.
        names: a list.
        bare: a section with defaults.
    """

    name: str
    model: Tree | Forest | None = None
    parts: str | list[Base] = ""
    mode: Literal["fast", "slow"] = "fast"
    names: list[str] = field(default_factory=list)
    bare: Base = field(default_factory=Base)


def test_keys_have_types_defaults_and_texts():
    keys = {key.name: key for key in config_keys(schema_of(Settings))}
    assert keys["rate"] == ConfigKey("rate", "number", "0.5", "of the base, in two lines.")
    assert keys["high"] == ConfigKey("high", "integer | null", "null", "bounds.")
    assert keys["name"].default is None  # required
    assert keys["model"][1:3] == ("section of kind tree | section of kind forest | null", "null")
    assert keys["model{tree}.depth"].default == "3" and keys["model{forest}.trees"].default == "10"
    assert keys["model{tree,forest}.seed"].text == "of both kinds."
    assert keys["parts[].rate"].default == "0.5"
    assert keys["mode"].type == '"fast" | "slow"' and keys["names"][1:3] == ("list of string", "[]")
    assert keys["bare.low"].default == "1" and "bare" not in keys
    assert list(keys)[:3] == ["rate", "low", "high"]


def test_a_text_ends_with_its_section():
    class Documented:
        """One.

        Attributes:
            first: a
                text: with a colon.

        Raises:
            second: no attribute.
        """

    assert attribute_texts(Documented) == {"first": "a text: with a colon."}


@pytest.mark.parametrize("stage", STAGES)
def test_every_key_of_a_stage_is_described(stage):
    assert [key.name for key in config_keys(packaged_schema(stage)) if not key.text] == []


def classes_in(kind: Any) -> set[type]:
    """The config classes that a type is made of, with those of their sections."""
    inner = list(get_type_hints(kind).values()) if is_dataclass(kind) else get_args(kind)
    return {each for part in inner for each in classes_in(part)} | ({kind} if is_dataclass(kind) else set())


@pytest.mark.parametrize("stage", STAGES)
def test_a_section_set_in_part_keeps_the_stages_other_defaults(stage):
    """From YAML and Python, which `build` checks alike, and in the schema, which help shows."""
    config_class = find_stage(stage)[0]
    described = {key.name: key.default for key in config_keys(packaged_schema(stage))}
    for cls in classes_in(config_class):
        made = {each.name: each.default_factory() for each in fields(cls) if each.default_factory is not MISSING}
        for name, section in made.items():
            for key, value in asdict(section).items() if is_dataclass(section) else ():
                holder = make_dataclass("Holder", [(name, get_type_hints(cls, include_extras=True)[name])])
                assert getattr(build(holder, SourcedYaml({name: {key: value}})), name) == section, (cls, name, key)
                if cls is config_class and not isinstance(value, dict) and key != "kind":
                    assert json.loads(described[f"{name}.{key}"] or "") == json.loads(json.dumps(value))


def test_a_rate_alone_leaves_eps_of_ppo_and_sgd_has_none_to_refuse(tmp_path):
    config = tmp_path / "ppo.yaml"
    config.write_text("policy: base\noutput: out\nreward_model: rm\ndata: {train: rows.jsonl}\n")
    cls = find_stage("ppo")[0]
    rates = ["optim.learning_rate=1e-4", "value_optim.learning_rate=1e-3"]
    set_in_part = load_config(cls, str(config), rates)
    assert set_in_part.optim.eps == set_in_part.value_optim.eps == 1e-5
    assert load_config(cls, str(config), ["optim.schedule=linear"]).optim.learning_rate == 1e-6
    assert load_config(cls, str(config), ["optim.name=sgd"]).optim.name == "sgd"
    assert load_config(cls, str(config), ["optim.name=sgd", "optim.eps=1e-8"]).optim.eps == 1e-8  # of an earlier run


@pytest.mark.parametrize("stage", STAGES)
def test_the_packaged_schema_is_that_of_the_config_class(stage):
    assert packaged_schema(stage) == json.loads(json.dumps(schema_of(find_stage(stage)[0]))), "run `make schemas`"


def test_every_packaged_schema_is_that_of_a_stage():
    assert {path.stem for path in (packaged_folder("configs") / "schemas").iterdir()} == set(STAGES)


@pytest.mark.parametrize("words", ["sft --help", "ppo --help all", "evaluate winrate --help data", "schema dpo"])
def test_help_and_schema_load_no_torch(words):
    program = "import sys; from alignment.cli import main; sys.exit(main(sys.argv[1:]) or 'torch' in sys.modules)"
    command = [sys.executable, "-c", program, *words.split()]
    assert "data" in subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60).stdout


def test_the_schema_refuses_unknown_keys_and_names_required_ones():
    schema = schema_of(Settings)
    assert schema["additionalProperties"] is False and schema["required"] == ["name"]
    assert schema["properties"]["low"] == {"default": 1, "type": "integer", "description": "bounds."}
    json.dumps(schema)


@pytest.mark.parametrize("command", [["sft"], ["online-dpo"], ["evaluate", "winrate"]])
def test_help_shows_the_keys_that_matter_first_then_all_then_one(command, capsys):
    def shown(*topic: str) -> str:
        assert cli.main([*command, "--help", *topic]) == 0
        return capsys.readouterr().out

    keys = config_keys(packaged_schema(command[-1].replace("-", "_")))
    lines = [line for line in shown().partition("keys that matter first")[2].splitlines() if line.startswith("  ")]
    assert len(lines) <= 20 and "data.train (required)" in "".join(lines)
    everything = shown("all")
    assert all(f"  {key.name} (" in everything for key in keys)
    (head, *_) = shown("data.max_length").splitlines()
    assert head == "  data.max_length (default 1024): integer"
    assert cli.main([*command, "--help", "data.max_lenth"]) == 2 and "data.max_length" in capsys.readouterr().err


def test_schema_is_printed_for_a_stage_and_no_other_name(capsys):
    assert cli.main(["schema", "dpo"]) == 0
    assert "beta" in json.loads(capsys.readouterr().out)["properties"]
    assert cli.main(["schema", "dpoo"]) == 2
    assert "did you mean 'dpo'" in capsys.readouterr().err
