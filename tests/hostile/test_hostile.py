"""Files as an attacker would write them: each is refused by name, and nothing runs, leaks, hangs or fills the memory."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux", reason="limits of memory and times of access are looked at as on Linux"
    ),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]

Spoil = Callable[..., None]
CASES: dict[str, tuple[str, Spoil, str]] = {}  # name: (what is spoilt, how, what the message must name)
NEST = 200_000
BYTES = 300 * 2**20


def case(good: str, named: str) -> Callable[[Spoil], Spoil]:
    """Files a hostile directory under its function's name; several good ones to start from: "native foreign"."""

    def add(spoil: Spoil) -> Spoil:
        for start in good.split():
            CASES[f"{spoil.__name__}-{start}"] = (start, spoil, named)
        return spoil

    return add


BOTH = "native foreign"


def change(name: str, good: str, named: str, file: str, **changes: object) -> None:
    """A case that changes keys of a JSON file."""
    CASES.update(
        {f"{name}-{start}": (start, lambda folder: folder.change(file, **changes), named) for start in good.split()}
    )


def write(name: str, good: str, named: str, file: str, content: object) -> None:
    """A case that replaces a file."""
    CASES.update(
        {f"{name}-{start}": (start, lambda folder: folder.write(file, content), named) for start in good.split()}
    )


def link(name: str, good: str) -> None:
    """A case of a file that is a link out of the directory."""

    def spoil(folder) -> None:
        if not (folder.path / name).exists():
            folder.write(name, "{}")
        folder.link_out(name)

    CASES.update({f"link_{name}-{start}": (start, spoil, name) for start in good.split()})


# --- weights --------------------------------------------------------------------------------------------------------


def shards(folder, name: str) -> None:
    """All tensors in one shard that the index calls by `name`; the shard itself lies outside."""
    tensors = {}
    for path in sorted(folder.path.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    save_file(tensors, folder.outside / "private.safetensors", metadata={"format": "pt"})
    folder.write("model.safetensors.index.json", {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)})


@case(BOTH, "index.json")
def index_that_climbs_out(folder):
    shards(folder, "../elsewhere/private.safetensors")


@case(BOTH, "index.json")
def index_with_an_absolute_path(folder):
    shards(folder, str(folder.outside / "private.safetensors"))


@case(BOTH, "sub")
def index_through_a_linked_directory(folder):
    shards(folder, "sub/private.safetensors")
    (folder.path / "sub").symlink_to(folder.outside)


@case(BOTH, "part.safetensors")
def shard_that_is_a_link(folder):
    shards(folder, "part.safetensors")
    (folder.path / "part.safetensors").symlink_to(folder.outside / "private.safetensors")


link("model.safetensors", "native")


@case("native", "model.safetensors")
def weights_through_links_of_links(folder):
    folder.link_out("model.safetensors")
    (folder.path / "model.safetensors").rename(folder.path / "inner")
    (folder.path / "model.safetensors").symlink_to("inner")


@case("native", "model.safetensors")
def weights_in_a_false_cache(folder):
    """A directory that looks like the Hub's cache, but whose `blobs` leads out."""
    folder.link_out("model.safetensors")
    (folder.path / "model.safetensors").unlink()
    cache = folder.root / "given2"
    (cache / "snapshots").mkdir(parents=True)
    (cache / "blobs").symlink_to(folder.outside)
    folder.path.rename(cache / "snapshots" / "main")
    folder.path.symlink_to(cache / "snapshots" / "main")
    (folder.path / "model.safetensors").symlink_to("../../blobs/model.safetensors")


@case("native", "model.safetensors")
def weights_that_are_a_pipe(folder):
    (folder.path / "model.safetensors").unlink()
    os.mkfifo(folder.path / "model.safetensors")


@case("native", "pytorch_model.bin")
def weights_as_a_pickle_that_runs_code(folder):
    (folder.path / "model.safetensors").unlink()
    run = f"cposix\nsystem\n(S'touch {folder.canary}'\ntR."
    folder.write("pytorch_model.bin", run)


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


F4 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS = {
    "empty": b"",
    "of_four_bytes": b"abcd",
    "longer_than_the_file": raw(b"{}", length=2**62),
    "of_a_hundred_megabytes": raw(b"{}", length=10**8),
    "no_json": raw(b"{" * 1000),
    "nested": raw(b'{"a":' * NEST),
    "a_list": raw([]),
    "no_offsets": raw({"a": {"dtype": "F32", "shape": [2]}}),
    "beyond_the_file": raw({"a": {**F4, "data_offsets": [0, 2**60]}}, bytes(8)),
    "negative": raw({"a": {**F4, "data_offsets": [-8, 0]}}, bytes(8)),
    "overlapping": raw({"a": F4, "b": F4}, bytes(8)),
    "larger_than_the_data": raw({"a": {**F4, "shape": [2**40]}}, bytes(8)),
    "overflowing": raw({"a": {**F4, "shape": [2**62, 4]}}, bytes(8)),
    "unknown_type": raw({"a": {**F4, "dtype": "PYTHON"}}, bytes(8)),
    "odd_metadata": raw({"__metadata__": {"format": ["pt"]}, "a": F4}, bytes(8)),
}
for _name, _content in HEADERS.items():
    write(f"header_{_name}", "native", "model.safetensors", "model.safetensors", _content)
for _name in ("longer_than_the_file", "no_json", "beyond_the_file", "odd_metadata"):
    write(f"header_{_name}", "foreign", "model-00001-of", "model-00001-of-00004.safetensors", HEADERS[_name])

INDICES = {
    "no_json": "{",
    "a_list": [],
    "nested": '{"weight_map":' * NEST,
    "no_map": {},
    "map_is_a_list": {"weight_map": ["a"]},
    "shard_is_a_number": {"weight_map": {"a": 7}},
    "shard_is_missing": {"weight_map": {"a": "b.safetensors"}},
    "shard_is_a_pickle": {"weight_map": {"a": "pytorch_model.bin"}},
    "of_nothing": {"weight_map": {}},
}
for _name, _content in INDICES.items():
    write(f"index_{_name}", "foreign", "index.json", "model.safetensors.index.json", _content)

# --- config ---------------------------------------------------------------------------------------------------------

for _name, _content in {
    "no_json": "{'a': 1}", "a_list": [], "a_number": 7, "empty": "", "nested": '{"a":' * NEST, "no_utf8": b"\xff\xfe{}",
    "digits": '{"hidden_size": ' + "9" * 10_000 + "}",
}.items():  # fmt: skip
    write(f"config_{_name}", BOTH, "config.json", "config.json", _content)

for _key, _value in {
    "num_hidden_layers": 10**8, "hidden_size": 10**12, "vocab_size": 10**12, "intermediate_size": 10**12,
    "num_attention_heads": 10**9, "num_key_value_heads": 10**9,
}.items():  # fmt: skip
    change(f"config_huge_{_key}", BOTH, "config.json", "config.json", **{_key: _value})
for _value in (0, -4, "7", [2], None, 1e300, True):
    change(f"config_layers_{_value}", "native", "config.json", "config.json", num_hidden_layers=_value)
change("config_fairly_large_vocab", BOTH, "", "config.json", vocab_size=10**9)
change("config_hidden_and_heads", BOTH, "config.json", "config.json", hidden_size=10**10, num_attention_heads=10**10)
change("config_code", BOTH, "config.json", "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
change("config_unknown_type", BOTH, "nobody", "config.json", model_type="nobody")
change("config_list_type", BOTH, "config.json", "config.json", model_type=["llama"])
change("config_unknown_key", "native", "config.json", "config.json", attention_chunk_size=4)
change(
    "config_other_weights", "foreign", "config.json", "config.json",
    quantization_config={"quant_method": "gguf", "gguf_file": "../elsewhere/model.gguf"},
)  # fmt: skip
change("config_gguf", "foreign", "config.json", "config.json", gguf_file="../elsewhere/model.gguf")
change("config_kernel", "foreign", "config.json", "config.json", attn_implementation="someone/kernel")
change("config_inner_kernel", "foreign", "config.json", "config.json", _attn_implementation="someone/kernel")


link("config.json", BOTH)
link("generation_config.json", "native")


@case("native", "config.json")
def config_of_many_megabytes(folder):
    with open(folder.path / "config.json", "r+b") as file:
        file.truncate(BYTES)


@case("native", "config.json")
def config_of_code_beside_a_module(folder):
    folder.change("config.json", auto_map={"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"})
    folder.write("evil.py", f"open({str(folder.canary)!r}, 'w')")


for _name, _content in {"no_json": "{", "a_list": [], "nested": '{"a":' * NEST}.items():
    write(f"generation_config_{_name}", BOTH, "generation_config.json", "generation_config.json", _content)

# --- tokenizer ------------------------------------------------------------------------------------------------------

for _name, _content in {
    "no_json": "{", "a_list": [], "empty": "", "nested": '{"a":' * NEST, "no_model": {"version": "1.0"},
    "of_numbers": {"version": 1, "model": 7, "added_tokens": 3},
}.items():  # fmt: skip
    write(f"tokenizer_{_name}", "native", "given", "tokenizer.json", _content)
    if _name in ("no_json", "a_list", "empty", "nested"):
        write(f"tokenizer_config_{_name}", "native", "given", "tokenizer_config.json", _content)
for _name in (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "vocab.json",
):
    link(_name, "native")
for _name, _value in {"auto_map": {"AutoTokenizer": ["e.T", None]}, "trust_remote_code": True}.items():
    change(f"tokenizer_{_name}", "native", "tokenizer_config.json", "tokenizer_config.json", **{_name: _value})


@case("native", "additional_chat_templates")
def named_template_that_is_a_link(folder):
    (folder.path / "additional_chat_templates").mkdir()
    (folder.outside / "a.jinja").write_text("a")
    (folder.path / "additional_chat_templates" / "a.jinja").symlink_to(folder.outside / "a.jinja")


@case("native", "additional_chat_templates")
def templates_in_a_linked_directory(folder):
    (folder.outside / "a.jinja").write_text("a")
    (folder.path / "additional_chat_templates").symlink_to(folder.outside)


def redirected_tokenizer(key: str, value: object) -> Spoil:
    def spoil(folder) -> None:
        folder.move_out("tokenizer.json").rename(folder.outside / "tokenizer.4.0.0.json")
        folder.change("tokenizer_config.json", **{key: value})

    return spoil


OUT = "../elsewhere/tokenizer.4.0.0.json"
for _key, _value in {
    "gguf_file": OUT, "tokenizer_file": OUT, "vocab_file": OUT, "fast_tokenizer_files": ["tokenizer.json", OUT]
}.items():  # fmt: skip
    CASES[f"tokenizer_elsewhere_{_key}"] = ("native", redirected_tokenizer(_key, _value), "tokenizer_config.json")


@case("native", "given")
def pattern_that_backtracks(folder):
    path = folder.path / "tokenizer.json"
    whole = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, whole["pre_tokenizer"]]}
    folder.write("tokenizer.json", whole)


@case("native", "given")
def token_ids_beyond_the_model(folder):
    whole = json.loads((folder.path / "tokenizer.json").read_text())
    added = {"id": 2**31, "content": "Why", "special": True, "normalized": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    folder.write("tokenizer.json", {**whole, "added_tokens": [*whole["added_tokens"], {**added, **flags}]})


@case("native", "given")
def sentencepiece_of_noise(folder):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (folder.path / name).unlink()
    folder.write("tokenizer.model", bytes(range(256)) * 64)


# --- adapters -------------------------------------------------------------------------------------------------------

CONFIG, OWN, WEIGHTS = "adapter_config.json", "alignment_adapter.json", "adapter_model.safetensors"
for _name, _content in {
    "no_json": "{", "a_list": [], "empty": "", "nested": '{"a":' * NEST, "of_nothing": {}, "no_utf8": b"\xff{}",
}.items():  # fmt: skip
    write(f"adapter_config_{_name}", "lora", CONFIG, CONFIG, _content)
for _name, _content in {"no_json": "{", "a_list": [], "unknown_key": {"rnk": 4}, "nested": "[" * NEST}.items():
    write(f"adapter_settings_{_name}", "lora", OWN, OWN, _content)
for _name, _changes in {
    "rank_huge": {"rank": 30_000_000}, "rank_text": {"rank": "four"}, "rank_zero": {"rank": 0}, "rank_half": {"rank": 1.5},
    "rank_twice": {"rank": 8}, "backtracking": {"layers": "(.*)*(.*)*(.*)*!"}, "no_pattern": {"layers": "("},
    "every_layer": {"layers": ".*"}, "rank_large": {"rank": 60_000}, "layers_list": {"layers": ["a"]}, "alpha_nan": {"alpha": "nan"},
}.items():  # fmt: skip
    change(f"adapter_{_name}", "lora", "given", OWN, **_changes)


def foreign_adapter(**changes: object) -> Spoil:
    """As another program writes it, without our settings."""

    def spoil(folder) -> None:
        (folder.path / OWN).unlink()
        config = json.loads((folder.path / CONFIG).read_text())
        folder.write(CONFIG, {key: value for key, value in {**config, **changes}.items() if value is not ...})

    return spoil


for _name, _changes in {
    "no_rank": {"r": ...}, "rank_null": {"r": None}, "rank_huge": {"r": 30_000_000}, "rank_text": {"r": "8"},
    "rank_list": {"r": [8]}, "alpha_text": {"lora_alpha": "x"}, "no_alpha": {"lora_alpha": ...},
    "kind": {"peft_type": "LOHA"}, "kind_list": {"peft_type": ["LORA"]}, "ranks": {"rank_pattern": {"a": 10**9}},
}.items():  # fmt: skip
    CASES[f"peft_{_name}"] = ("lora", foreign_adapter(**_changes), "given")
change("adapter_code", "lora prefix", CONFIG, CONFIG, auto_map={"base_model_class": "evil.Model"})
change("adapter_without_base", "lora", CONFIG, CONFIG, base_model_name_or_path=None)
change("adapter_base_is_a_number", "lora", CONFIG, CONFIG, base_model_name_or_path=7)
change("adapter_base_is_missing", "lora", "/nowhere/at/all", CONFIG, base_model_name_or_path="/nowhere/at/all")
for _value in (10**12, "4", None, 0, 5, [4]):
    change(f"prefix_tokens_{_value}", "prefix", "given", CONFIG, num_virtual_tokens=_value)
for _name in ("empty", "longer_than_the_file", "no_json", "beyond_the_file", "larger_than_the_data"):
    write(f"adapter_header_{_name}", "lora prefix", WEIGHTS, WEIGHTS, HEADERS[_name])
write("adapter_other_tensors", "lora prefix", "given", WEIGHTS, raw({"a": F4}, bytes(8)))
for _name in (CONFIG, OWN, WEIGHTS):
    link(_name, "lora")


@case("foreign", "adapter_config.json")
def base_that_is_an_adapter_itself(folder):
    """transformers would go on to whatever base the second adapter names."""
    folder.write(CONFIG, {"peft_type": "LORA", "base_model_name_or_path": str(folder.outside), "r": 4})
    base, folder.path = folder.path, folder.root / "adapter"
    folder.path.mkdir()
    folder.write(CONFIG, {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 4, "lora_alpha": 8})
    folder.write(WEIGHTS, raw({}))


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_model_directory_is_refused_by_name(name, good, run_apart, folder_of):
    start, spoil, named = CASES[name]
    folder = folder_of(good[start])
    spoil(folder)
    folder.watch()
    outcome = run_apart(
        "generate", "--model", str(folder.path), "--prompt", "Why? " + "x" * 40 + "z", "max_new_tokens=1"
    )
    assert outcome.code == 2, outcome
    assert named in outcome.text.rpartition("\nerror: ")[2], outcome.text
    assert "Traceback" not in outcome.text
    assert not folder.canary.exists()
    assert folder.unread()


@pytest.mark.parametrize("start", ["native", "foreign", "lora", "prefix"])
def test_what_is_spoilt_was_good(start, good, run_apart, folder_of):
    folder = folder_of(good[start])
    outcome = run_apart("generate", "--model", str(folder.path), "--prompt", "Why?", "max_new_tokens=1")
    assert outcome.code == 0, outcome.text


def test_reading_a_file_outside_would_be_seen(folder_of):
    """The check that nothing outside was read can fail at all on this file system."""
    folder = folder_of(None)
    (folder.outside / "private").write_text("secret")
    folder.watch()
    assert folder.unread()
    (folder.outside / "private").read_text()
    if folder.unread():
        pytest.skip("the file system keeps no times of access")


def test_a_snapshot_of_the_hubs_cache_is_opened(good, run_apart, folder_of):
    """Its files are links into `blobs` beside `snapshots`."""
    folder = folder_of(good["native"])
    cache, snapshot = folder.root / "models--a--b", folder.root / "models--a--b" / "snapshots" / "0123"
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.path.iterdir())):
        path.rename(cache / "blobs" / str(number))
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", str(number)))
    outcome = run_apart("generate", "--model", str(snapshot), "--prompt", "Why?", "max_new_tokens=1")
    assert outcome.code == 0, outcome.text


@pytest.mark.parametrize("start", ["native", "foreign"])
def test_export_copies_nothing_from_outside(start, good, run_apart, folder_of):
    folder = folder_of(good[start])
    shards(folder, "../elsewhere/private.safetensors")
    folder.watch()
    output = folder.root / "exported"
    outcome = run_apart("export", "--model", str(folder.path), "--output", str(output))
    assert outcome.code == 2 and "index.json" in outcome.text, outcome
    assert not output.exists() and folder.unread()
