"""Tokenizers: load, save, compare with a model's vocabulary. Text to ids is in text/chat.py."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from alignment.data.tokenizers.tokenizer import Tokenizer, is_panic
from alignment.errors import UserError, raise_all
from alignment.files import check_directory, read_json_object, write_atomic, write_json

GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))  # the old and the new names
GPT2_END = "<|endoftext|>"
WORDPIECE_FILE = "vocab.txt"
FOREIGN_CODE = ("auto_map", "trust_remote_code", "gguf_file")
UNUSED_KEY = "special_tokens_map_file"  # old directories name its author's own path
LOADING_OPTIONS = ("is_local", "local_files_only")  # written by transformers; say nothing about the tokenizer


def read_tokenizer_files(source: str | Path) -> Tokenizer:
    """The tokenizer of a local directory: tokenizer.json and its neighbors, or GPT-2's or BERT's own vocabulary files.

    A directory whose config.json names a model type leaves other old files to transformers. Refused: files that cannot be
    read, and a request for code or files from elsewhere.
    """
    path = Path(source)
    if not path.is_dir():
        raise UserError(f"{path}: no such directory; name one that holds tokenizer.json")
    try:
        return _load_directory(path)
    except BaseException as error:  # tokenizers raises bare Exception for a broken file
        if isinstance(error, UserError) or not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise UserError(f"{path}: the tokenizer cannot be read: {type(error).__name__}: {error}") from error


def _load_directory(directory: Path) -> Tokenizer:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    check_directory(directory)
    for name in ("tokenizer_config.json", "config.json"):
        _refuse_foreign_code(directory / name)
    names = {file.name for file in directory.iterdir()}
    if "tokenizer.json" in names:
        # As the file says: transformers' class for a model type may rebuild the pipeline in its own way.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        if tokenizer.eos_token is not None:
            return cast("Tokenizer", tokenizer)
    elif "tokenizer_config.json" not in names and (original := _load_vocabulary_files(directory, names)) is not None:
        original.name_or_path = str(directory)
        return original
    # Old directories leave the end token's name to the class of their model type.
    return cast("Tokenizer", AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False))


def _load_vocabulary_files(directory: Path, names: set[str]) -> Tokenizer | None:
    """The tokenizer of GPT-2's or BERT's own files; None: config.json names a model type that transformers reads."""
    for vocabulary, merges in GPT2_FILES:
        if {vocabulary, merges} <= names:
            return _load_gpt2(directory / vocabulary, directory / merges)
    config = directory / "config.json"
    has_vocabulary = WORDPIECE_FILE in names or any(name.endswith(".model") for name in names)
    if has_vocabulary and config.exists() and read_json_object(config).get("model_type"):
        return None
    if WORDPIECE_FILE in names:
        return _load_wordpiece(directory / WORDPIECE_FILE)
    raise UserError(
        f"{directory}: no tokenizer here; expected tokenizer.json, or encoder.json + vocab.bpe, or vocab.txt, found "
        f"{', '.join(sorted(names)) or 'nothing'}"
    )


def _load_gpt2(vocabulary: Path, merges: Path) -> Tokenizer:
    """BOS = EOS = <|endoftext|>, not put before texts; <|pad|> is one more token."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    from alignment.data.tokenizers.train import byte_level, wrap

    tokenizer = byte_level(Backend(models.BPE.from_file(str(vocabulary), str(merges))))
    if tokenizer.token_to_id(GPT2_END) is None:
        raise UserError(f"{vocabulary}: {GPT2_END} is not in it, so it is not GPT-2's; save tokenizer.json instead")
    return wrap(tokenizer, bos_token=GPT2_END, eos_token=GPT2_END, pad_token="<|pad|>", extra_special_tokens=[])


def _load_wordpiece(path: Path) -> Tokenizer:
    """BERT's vocabulary, one piece a line; one without a capital letter is of texts folded to small letters."""
    from alignment.data.tokenizers.train import BERT_TOKENS, wordpiece

    pieces = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    ids = {piece: number for number, piece in enumerate(pieces)}
    if missing := [token for token in BERT_TOKENS if token not in ids]:
        raise UserError(f"{path}: {', '.join(missing)} is missing, so it is not BERT's; save tokenizer.json instead")
    return wordpiece(ids, lowercase=all(piece == piece.lower() for piece in ids if piece[:1] != "["))


def _refuse_foreign_code(path: Path) -> None:
    raise_all(
        f"{path}: {key} asks for code or files from elsewhere, which are never read; save the tokenizer as tokenizer.json"
        for key, value in (read_json_object(path) if path.exists() else {}).items()
        if (key in FOREIGN_CODE and value)
        or (key != UNUSED_KEY and key.endswith(("_file", "_files")) and _leads_out(path, value))
    )


def _leads_out(path: Path, value: Any) -> bool:
    """True where a file that a config names, or one of several, is there and lies outside the config's directory."""
    names = [name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str) and name]
    return any(Path(name).name != name and (path.parent / name).exists() for name in names)


def add_new_tokens(tokenizer: Tokenizer, tokens: Sequence[str], special_tokens: Sequence[str]) -> None:
    """Add tokens to a tokenizer, in place; their ids follow each other.

    Each of `tokens` is one token wherever a text has it; `special_tokens` are control tokens, which only a template writes.
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
    for contents, special in ((tokens, False), (special_tokens, True)):
        tokenizer.add_tokens([AddedToken(each, normalized=False, special=special) for each in contents], special)


def save_tokenizer(tokenizer: Tokenizer, directory: str | Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template(s) into a directory, each file atomically."""
    directory = Path(directory)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        config = Path(folder) / "tokenizer_config.json"
        settings = read_json_object(config)
        if settings.get("tokenizer_class") == "TokenizersBackend":  # a name that older versions do not know
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        write_json(config, {key: value for key, value in settings.items() if key not in LOADING_OPTIONS})
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):  # named templates: in a folder
            target = directory / path.relative_to(folder)
            write_atomic(target, lambda temporary, path=path: shutil.copyfile(path, temporary))


def check_vocabulary(tokenizer: Tokenizer, vocabulary: int) -> None:
    """Refuse a tokenizer that can give ids for which the model's embedding of `vocabulary` rows has none."""
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
