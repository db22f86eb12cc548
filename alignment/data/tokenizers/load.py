"""Tokenizers: load, save, compare with a model's vocabulary. Text to ids is in text/chat.py."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from alignment.data.tokenizers.tokenizer import Tokenizer, is_panic
from alignment.errors import UserError, raise_all
from alignment.files import check_directory, read_json_object, write_atomic, write_json

FOREIGN_CODE = ("auto_map", "trust_remote_code", "gguf_file")
UNUSED_KEY = "special_tokens_map_file"  # old directories name its author's own path
LOADING_OPTIONS = ("is_local", "local_files_only")  # written by transformers; say nothing about the tokenizer


def read_tokenizer_files(source: str | Path) -> Tokenizer:
    """The tokenizer of a local directory: tokenizer.json and its neighbors, or its authors' own files.

    Those are GPT-2's pair (encoder.json + vocab.bpe, or vocab.json + merges.txt), BERT's vocab.txt, and a SentencePiece
    model; the latter two may be named themselves. A directory with a tokenizer_config.json, or a config.json that names
    a model type, leaves it to transformers how they are read.

    Raises:
        UserError: no such directory, no tokenizer in it, unreadable files, or a request for code or files from elsewhere.
    """
    from alignment.data.tokenizers.original_files import load_original_file

    path = Path(source)
    if not path.is_file() and not path.is_dir():
        raise UserError(f"{path}: no such directory; name one that holds tokenizer.json")
    try:
        return load_original_file(path) if path.is_file() else _load_directory(path)
    except UserError:
        raise
    except BaseException as error:  # tokenizers raises bare Exception for a broken file; every other error is raised
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise UserError(f"{path}: the tokenizer cannot be read: {type(error).__name__}: {error}") from error


def _load_directory(directory: Path) -> Tokenizer:
    """The tokenizer of a directory, by the files that it has."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    check_directory(directory)
    for name in ("tokenizer_config.json", "config.json"):
        _refuse_foreign_code(directory / name)
    names = {file.name for file in directory.iterdir()}
    if (
        not names & {"tokenizer.json", "tokenizer_config.json"}
        and (original := _load_original(directory, names)) is not None
    ):
        return original
    if "tokenizer.json" in names:
        # As the file says: transformers' class for a model type may rebuild the pipeline in its own way.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        if tokenizer.eos_token is not None:
            return cast("Tokenizer", tokenizer)
    # Old directories leave the end token's name to the class of their model type.
    return cast("Tokenizer", AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False))


def _load_original(directory: Path, names: set[str]) -> Tokenizer | None:
    """The tokenizer of a directory that holds its authors' own files alone; None: transformers knows how to read them.

    Raises:
        UserError: there are no such files, several tokenizers, or unreadable files.
    """
    from alignment.data.tokenizers.original_files import GPT2_FILES, WORDPIECE_FILE, load_gpt2, load_original_file

    for vocabulary, merges in GPT2_FILES:
        if {vocabulary, merges} <= names:
            return load_gpt2(directory / vocabulary, directory / merges)
    single = sorted(name for name in names if name == WORDPIECE_FILE or name.endswith(".model"))
    if not single:
        raise UserError(
            f"{directory}: no tokenizer here; expected tokenizer.json, or encoder.json + vocab.bpe, vocab.txt or a "
            f".model file, found {', '.join(sorted(names)) or 'nothing'}"
        )
    config = directory / "config.json"
    if config.exists() and read_json_object(config).get("model_type"):
        return None
    if len(single) > 1:
        raise UserError(f"{directory}: several tokenizers here: {', '.join(single)}; name the one that is meant")
    return load_original_file(directory / single[0])


def _refuse_foreign_code(path: Path) -> None:
    if not path.exists():
        return
    config = read_json_object(path)
    raise_all(
        f"{path}: {key} asks for code or files from elsewhere, which are never read; save the tokenizer as tokenizer.json"
        for key, value in config.items()
        if (key in FOREIGN_CODE and value)
        or (key != UNUSED_KEY and key.endswith(("_file", "_files")) and _leads_out(path, value))
    )


def _leads_out(path: Path, value: Any) -> bool:
    """True where a file that a config names, or one of several, is there and lies outside the config's directory."""
    names = [name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str) and name]
    return any(Path(name).name != name and (path.parent / name).exists() for name in names)


def add_new_tokens(tokenizer: Tokenizer, tokens: Sequence[str], special_tokens: Sequence[str]) -> None:
    """Add tokens to a tokenizer, in place; their ids follow each other.

    Args:
        tokens: each is one token wherever a text has it, and is kept when ids become text.
        special_tokens: control tokens, which a chat template writes; such a string in a row's text stays ordinary text.

    Raises:
        UserError: naming every token that is blank, given twice or in the vocabulary already.
    """
    from transformers import AddedToken

    known, new = tokenizer.get_vocab(), [*tokens, *special_tokens]
    problems = {token: "it is blank" for token in new if not token.strip()}
    problems |= {token: f"the vocabulary has it already, as {known[token]}" for token in new if token in known}
    problems |= {token: "it is given twice" for token in new if new.count(token) > 1}
    raise_all(
        f"{tokenizer.name_or_path}: token {token!r} cannot be added, since {problem}; leave it out"
        for token, problem in problems.items()
    )
    for contents, is_special in ((tokens, False), (special_tokens, True)):
        tokenizer.add_tokens(
            [AddedToken(content, normalized=False, special=is_special) for content in contents], is_special
        )
    if taken := {tokenizer.convert_tokens_to_ids(token) for token in new} & set(known.values()):
        raise UserError(
            f"{tokenizer.name_or_path}: its ids have gaps, and {min(taken)} would be that of two tokens; add the tokens "
            "with other ids in tokenizer.json"
        )


def save_tokenizer(tokenizer: Tokenizer, directory: str | Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template(s) into a directory, each file atomically."""
    directory = Path(directory)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        config = Path(folder) / "tokenizer_config.json"
        write_json(config, _portable(json.loads(config.read_text(encoding="utf-8"))))
        for path in sorted(
            path for path in Path(folder).rglob("*") if path.is_file()
        ):  # named templates lie in a folder
            target = directory / path.relative_to(folder)
            write_atomic(target, lambda temporary, path=path: shutil.copyfile(path, temporary))


def _portable(config: dict[str, Any]) -> dict[str, Any]:
    """The config under the class name that every version of transformers knows, without notes of how it was loaded."""
    config = {key: value for key, value in config.items() if key not in LOADING_OPTIONS}
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    return config


def check_vocabulary(tokenizer: Tokenizer, vocabulary: int) -> None:
    """Refuse a tokenizer that can give ids the model has no row for.

    Args:
        vocabulary: rows of the model's embedding.

    Raises:
        UserError: naming how many tokens are too many, and the special ones among them.
    """
    too_high = {token: index for token, index in tokenizer.get_vocab().items() if index >= vocabulary}
    if not too_high:
        return
    lowest = sorted(too_high.items(), key=lambda item: item[1])[:5]
    examples = ", ".join(f"{token!r} = {index}" for token, index in lowest)
    raise UserError(
        f"the tokenizer {tokenizer.name_or_path} has {len(too_high)} tokens that the model's "
        f"vocabulary of {vocabulary} lacks: {examples}; take the tokenizer that came with the model, or build the "
        "model with a larger vocab_size"
    )
