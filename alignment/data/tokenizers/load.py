"""Tokenizers: train byte-level BPE, load, save, compare with a model's vocabulary. Text to ids is in chat.py.

Other kinds are trained in train_tokenizers.py; their authors' own files are read in raw_tokenizers.py.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment.data.text.encoding import is_panic
from alignment.data.tokenizers.original_files import RAW_PAIRS, WORDPIECE_FILE, load_original
from alignment.data.tokenizers.wrap import wrap_bos
from alignment.errors import UserError, raise_all
from alignment.files import check_directory, read_json_object, write_atomic, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

FOREIGN_CODE = ("auto_map", "trust_remote_code", "gguf_file")
NEVER_OPENED = "special_tokens_map_file"  # old directories name its author's own path
NOTES_OF_LOADING = ("is_local", "local_files_only")  # transformers writes how it was called; no property of a tokenizer


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str] = ("<s>", "</s>", "<pad>"),
    chat_template: str | None = None,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer fitted to the texts; it puts BOS before every text.

    Args:
        texts: read once, in order.
        vocab_size: tokens in all; at least 256 bytes and the special tokens. Few texts may give fewer.
        special_tokens: BOS, EOS, PAD, then any others (a template's turn markers); they take the first ids.
        chat_template: Jinja text that travels along.

    Raises:
        UserError: the vocabulary is too small, or there are fewer than three special tokens.

    Source: Sennrich et al. 2016, arXiv:1508.07909; on bytes as in Radford et al. 2019 (GPT-2).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if len(set(special_tokens)) < max(3, len(special_tokens)):
        raise UserError(f"special_tokens needs BOS, EOS and PAD first and no word twice, got {list(special_tokens)}")
    if vocab_size < 256 + len(special_tokens):
        raise UserError(
            f"vocab_size {vocab_size} is too small: 256 bytes and {len(special_tokens)} special tokens need "
            f"{256 + len(special_tokens)}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos, eos, pad, *others = special_tokens
    fast = wrap_bos(tokenizer, bos=bos, eos=eos, pad=pad, others=others, add_bos=True)
    fast.chat_template = chat_template
    return fast


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local directory: tokenizer.json and its neighbors, or its authors' own files.

    Those are GPT-2's pair (encoder.json + vocab.bpe, or vocab.json + merges.txt), BERT's vocab.txt, and a SentencePiece
    model; the latter two may be named themselves. A directory with a tokenizer_config.json, or a config.json that names
    a model type, leaves it to transformers how they are read.

    Raises:
        UserError: no such directory, no tokenizer in it, unreadable files, or a request for code or files from elsewhere.
    """
    path = Path(source)
    if not path.is_file() and not path.is_dir():
        raise UserError(f"{path}: no such directory; name one that holds tokenizer.json")
    try:
        return load_original(path) if path.is_file() else _load_any(path)  # type: ignore[return-value]
    except UserError:
        raise
    except BaseException as error:  # tokenizers raises bare Exception for a broken file; whatever it is, it is told
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise UserError(f"{path}: the tokenizer cannot be read: {type(error).__name__}: {error}") from error


def _load_any(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory, by the files that it has."""
    check_directory(path)
    for name in ("tokenizer_config.json", "config.json"):
        _refuse_foreign_code(path / name)
    names = {file.name for file in path.iterdir()}
    if not names & {"tokenizer.json", "tokenizer_config.json"}:
        pair = any(set(pair) <= names for pair in RAW_PAIRS)
        if (pair or not _model_type(path / "config.json")) and (raw := load_original(path)) is not None:
            return raw
        if not any(name == WORDPIECE_FILE or name.endswith(".model") for name in names):
            raise UserError(
                f"{path}: no tokenizer here; expected tokenizer.json, or encoder.json + vocab.bpe, vocab.txt or a "
                f".model file, found {', '.join(sorted(names)) or 'nothing'}"
            )
    return _load_directory(path, "tokenizer.json" in names)


def _model_type(path: Path) -> str:
    return read_json_object(path).get("model_type", "") if path.exists() else ""


def _refuse_foreign_code(path: Path) -> None:
    if not path.exists():
        return
    config = read_json_object(path)
    raise_all(
        f"{path}: {key} asks for code or files from elsewhere, which are never read; save the tokenizer as tokenizer.json"
        for key, value in config.items()
        if (key in FOREIGN_CODE and value)
        or (key != NEVER_OPENED and key.endswith(("_file", "_files")) and _leads_out(path, value))
    )


def _leads_out(path: Path, value: Any) -> bool:
    """Whether a file that a config names, or one of several, is there and lies outside the config's directory."""
    names = [name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str) and name]
    return any(Path(name).name != name and (path.parent / name).exists() for name in names)


def _load_directory(directory: Path, has_json: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if has_json:
        # As the file says: transformers' class for a model type may rebuild the pipeline in its own way.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        if tokenizer.eos_token is not None:
            return tokenizer
    # Old directories leave the end token's name to the class of their model type.
    return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: str | Path) -> None:
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
    config = {key: value for key, value in config.items() if key not in NOTES_OF_LOADING}
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    return config


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
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
