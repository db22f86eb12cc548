"""A tokenizer as the library uses it: loading, saving, its interface, texts to token ids, control tokens, its failures.

Whether a string such as "</s>" is a control token is the caller's choice, never the text's."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

from alignment.errors import UserError, raise_all
from alignment.files import check_directory, read_json_object, without_foreign_code, write_atomic, write_json

ANCHOR = "\n"  # a text put before another one, so that it is not the first


class Tokenizer(Protocol):
    """A tokenizer of transformers, as far as the library calls it; `PreTrainedTokenizerBase` fits."""

    name_or_path: str
    chat_template: Any  # Jinja text, or one text per name, or None
    bos_token_id: int | None
    eos_token_id: int | None
    published_ends: set[int]  # the control tokens that end a response by generation_config.json, where it was read

    def __len__(self) -> int: ...
    def __call__(self, text: str | Sequence[str], **options: Any) -> Any: ...
    def __getattr__(self, name: str) -> Any: ...


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], *, control_tokens: bool = False, after: str = ""
) -> list[list[int]]:
    """Ids of each text, nothing added.

    Args:
        control_tokens: True reads "</s>" and the like as the control token (only for text a template wrote);
            False spells such strings out in ordinary pieces.
        after: what stands before the texts: nothing; a control token, after which the tokenizer may begin anew; or
            ANCHOR for other text, after which SentencePiece-like tokenizers must not put a blank.
    """
    if not texts:
        return []
    plain = _encode(tokenizer, texts, control_tokens)
    if not after:
        return plain
    anchor, word, second = _encode(tokenizer, [ANCHOR, "a", ANCHOR + "a"], False)
    if not anchor or second[: len(anchor)] != anchor or second[len(anchor) :] == word:
        return plain
    before, joined, apart = _encode(tokenizer, [after, after + "a", after + "\na"], True)
    if apart == joined:  # Phi-3's control tokens swallow the blanks after them
        texts = [text.lstrip() for text in texts]
        plain = _encode(tokenizer, texts, control_tokens)
    if joined == [*before, *word]:  # the blank is put before a word after this control token too
        return plain
    # Such a tokenizer puts a blank before the first word only: encode a newline before the text, then drop its ids.
    anchored = _encode(tokenizer, [ANCHOR + text for text in texts], control_tokens)
    return [
        ids[len(anchor) :] if ids[: len(anchor)] == anchor else alone
        for ids, alone in zip(anchored, plain, strict=True)  # the newline may merge with the text's own first newline
    ]


def _encode(tokenizer: Tokenizer, texts: Sequence[str], control_tokens: bool) -> list[list[int]]:
    with naming_panics(tokenizer):
        if (backend := _plain_backend(tokenizer)) is not None:
            backend.encode_special_tokens = not control_tokens
            return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        encoded = tokenizer(  # verbose=False: no warning about long texts, which are truncated later
            list(texts),
            add_special_tokens=False,
            split_special_tokens=not control_tokens,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
    return cast("list[list[int]]", encoded["input_ids"])


def _plain_backend(tokenizer: Tokenizer) -> Any:
    """The object of the tokenizers library behind a tokenizer that hands texts to it as they are, else None."""
    from transformers import PreTrainedTokenizerFast

    backend = getattr(tokenizer, "_tokenizer", None)
    encode_plus = getattr(type(tokenizer), "_encode_plus", None)
    if backend is None or encode_plus is not getattr(PreTrainedTokenizerFast, "_encode_plus", 0):
        return None
    return backend if backend.truncation is None and backend.padding is None else None


def adds_bos(tokenizer: Tokenizer) -> bool:
    """True where the tokenizer itself puts its BOS before a text (post-processor or `add_bos_token`)."""
    with_special = cast("list[int]", tokenizer("a", add_special_tokens=True)["input_ids"])
    return with_special[:1] == [tokenizer.bos_token_id]


def control_strings(tokenizer: Tokenizer) -> list[str]:
    """The texts of all control tokens, longest first."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(special, key=lambda text: (-len(text), text))


@contextmanager
def naming_panics(tokenizer: Tokenizer) -> Iterator[None]:
    """Turn a panic of the tokenizers library, which is no `Exception`, into a `UserError`."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise UserError(
            f"{tokenizer.name_or_path or 'this tokenizer'}: tokenizer.json cannot read a text: {error}; take the "
            "tokenizer that its authors publish"
        ) from error


def is_panic(error: BaseException) -> bool:
    """True for a panic of Rust code; the class of that exception cannot be imported."""
    return type(error).__name__ == "PanicException"


GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))  # the old and the new names
GPT2_END = "<|endoftext|>"
WORDPIECE_FILE = "vocab.txt"
FOREIGN_CODE = ("trust_remote_code", "gguf_file")
UNUSED_KEY = "special_tokens_map_file"  # old directories name its author's own path
# Written by transformers, or the name of code that is never run; they say nothing about the tokenizer.
LOADING_OPTIONS = ("is_local", "local_files_only", "auto_map")


def read_tokenizer_files(source: str | Path) -> Tokenizer:
    """The tokenizer of a local directory: tokenizer.json and its neighbors, or GPT-2's or BERT's own vocabulary files.

    A directory whose config.json names a model type leaves other old files to transformers. Refused: files that cannot
    be read, and a request for code or files from elsewhere.
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
    return cast(
        "Tokenizer",
        wrap(tokenizer, bos_token=GPT2_END, eos_token=GPT2_END, pad_token="<|pad|>", extra_special_tokens=[]),
    )


def _load_wordpiece(path: Path) -> Tokenizer:
    """BERT's vocabulary, one piece a line; one without a capital letter is of texts folded to small letters."""
    from alignment.data.tokenizers.train import BERT_TOKENS, wordpiece

    pieces = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    ids = {piece: token_id for token_id, piece in enumerate(pieces)}
    if missing := [token for token in BERT_TOKENS if token not in ids]:
        raise UserError(f"{path}: {', '.join(missing)} is missing, so it is not BERT's; save tokenizer.json instead")
    return cast("Tokenizer", wordpiece(ids, lowercase=all(piece == piece.lower() for piece in ids if piece[:1] != "[")))


def _refuse_foreign_code(path: Path) -> None:
    config = without_foreign_code(read_json_object(path), path) if path.exists() else {}
    raise_all(
        f"{path}: {key} asks for code or files from elsewhere, which are never read; save the tokenizer as "
        "tokenizer.json"
        for key, value in config.items()
        if (key in FOREIGN_CODE and value)
        or (key != UNUSED_KEY and key.endswith(("_file", "_files")) and _leads_out(path, value))
    )


def _leads_out(path: Path, value: object) -> bool:
    """True where a file that a config names, or one of several, is there and lies outside the config's directory."""
    names = [name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str) and name]
    return any(Path(name).name != name and (path.parent / name).exists() for name in names)


def add_new_tokens(tokenizer: Tokenizer, tokens: Sequence[str], special_tokens: Sequence[str]) -> None:
    """Add tokens to a tokenizer, in place; their ids follow each other.

    Each of `tokens` is one token wherever a text has it; `special_tokens` are control tokens, which only a template
    writes.
    """
    from transformers import AddedToken

    known = tokenizer.get_vocab()
    new = [*tokens, *special_tokens]
    problems = {token: "it is blank" for token in new if not token.strip()}
    problems |= {token: f"the vocabulary has it already, as {known[token]}" for token in new if token in known}
    problems |= {token: "it is given twice" for token in new if new.count(token) > 1}
    raise_all(
        f"{tokenizer.name_or_path}: token {token!r} cannot be added, since {problem}; leave it out"
        for token, problem in problems.items()
    )
    for contents, special in ((tokens, False), (special_tokens, True)):
        tokenizer.add_tokens([AddedToken(content, normalized=False, special=special) for content in contents], special)


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


def known_tokens(tokenizer: Tokenizer) -> int:
    """One more than the largest id of a token: a model's vocabulary may be padded with rows from there on."""
    return 1 + max(tokenizer.get_vocab().values())


def check_vocabulary(tokenizer: Tokenizer, vocabulary: int) -> None:
    """Refuse a tokenizer that can give ids for which the model's embedding of `vocabulary` rows has none."""
    too_high = {token: index for token, index in tokenizer.get_vocab().items() if index >= vocabulary}
    if too_high:
        lowest = sorted(too_high.items(), key=lambda item: item[1])[:5]
        examples = ", ".join(f"{token!r} = {index}" for token, index in lowest)
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} has {len(too_high)} tokens that the model's "
            f"vocabulary of {vocabulary} lacks: {examples}; take the tokenizer that came with the model, or build the "
            "model with a larger vocab_size"
        )
