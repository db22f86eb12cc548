"""Tokenizers in their authors' own files: GPT-2's pair, BERT's vocab.txt, SentencePiece's .model. Writes none of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.data.tokenizers.wrap import BERT_TOKENS, bert_pipeline, wrap, wrap_bert
from alignment.errors import UserError

GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))  # the old and the new names
WORDPIECE_FILE = "vocab.txt"
GPT2_END, GPT2_PAD = "<|endoftext|>", "<|pad|>"
MAX_PIECE = 1000  # characters; SentencePiece's own default is 16
UNIGRAM, BPE = 1, 2  # model_type in a SentencePiece file
CONTROL, USER_DEFINED = 3, 4  # type of a piece there


def load_original_file(path: Path) -> Tokenizer:
    """The tokenizer of one original file: a vocab.txt or a SentencePiece model.

    Raises:
        UserError: a file of another name, or an unreadable one.
    """
    if path.suffix == ".model":
        tokenizer = load_sentencepiece(path)
    elif path.name == WORDPIECE_FILE:
        tokenizer = load_wordpiece(path)
    else:
        raise UserError(
            f"{path}: no tokenizer file that is known; give a directory, a {WORDPIECE_FILE} or a .model file"
        )
    tokenizer.name_or_path = str(path if path.suffix == ".model" else path.parent)
    return tokenizer


def load_gpt2(vocabulary: Path, merges: Path) -> Tokenizer:
    """GPT-2's vocabulary and merges. BOS = EOS = <|endoftext|>, not put before texts; <|pad|> is one more token."""
    try:
        tokenizer = Backend(models.BPE.from_file(str(vocabulary), str(merges)))
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(f"{vocabulary} and {merges.name} are no BPE vocabulary and merges: {error}") from error
    if tokenizer.token_to_id(GPT2_END) is None:
        raise UserError(f"{vocabulary}: {GPT2_END} is not in it, so it is not GPT-2's; save tokenizer.json instead")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = wrap(tokenizer, bos_token=GPT2_END, eos_token=GPT2_END, pad_token=GPT2_PAD, extra_special_tokens=[])
    fast.name_or_path = str(vocabulary.parent)
    return fast


def load_wordpiece(path: Path) -> Tokenizer:
    """BERT's vocabulary, one piece a line, the id its line number.

    A vocabulary without one capital letter is an uncased one: texts are folded to small letters without accents.

    Raises:
        UserError: [PAD], [UNK], [CLS], [SEP] or [MASK] is missing, or a piece stands there twice.
    """
    try:
        pieces = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error
    pieces = [piece.removesuffix("\r") for piece in pieces]
    ids = {piece: number for number, piece in enumerate(pieces)}
    if missing := [token for token in BERT_TOKENS if token not in ids]:
        raise UserError(f"{path}: {', '.join(missing)} is missing, so it is not BERT's; save tokenizer.json instead")
    if len(ids) < len(pieces):
        twice = next(piece for number, piece in enumerate(pieces) if ids[piece] != number)
        raise UserError(f"{path}:{pieces.index(twice) + 1}: {twice!r} stands in the vocabulary twice; ids would be off")
    model = models.WordPiece(vocab=ids, unk_token="[UNK]", max_input_chars_per_word=100)
    return wrap_bert(bert_pipeline(Backend(model), lowercase=_is_folded(pieces)))


def _is_folded(pieces: Sequence[str]) -> bool:
    """True for a vocabulary of small letters only; special tokens such as [CLS] and <s> are no letters."""
    return not any(piece != piece.lower() for piece in pieces if not (piece[:1] in "[<" and piece[-1:] in "]>"))


def load_sentencepiece(path: Path) -> Tokenizer:
    """A SentencePiece model, unigram or BPE, as a fast tokenizer that gives the same ids.

    The file names BOS, EOS, PAD and UNK; it does not say what its authors put around texts, so nothing is, but where
    it has ALBERT's [CLS] and [SEP]. A vocabulary without one capital letter was made of folded text (ALBERT): texts
    are folded likewise, to small letters without accents. T5's sentinels are not in its file: they are in the
    tokenizer.json of its directory.

    Raises:
        UserError: not such a file, or of a kind that is neither unigram nor BPE.

    Source: Kudo and Richardson 2018, arXiv:1808.06226; the file: sentencepiece_model.proto of its release.
    """
    model = _read_model(path)
    if model.trainer_spec.model_type not in (UNIGRAM, BPE):
        raise UserError(f"{path}: neither a unigram nor a BPE model (type {model.trainer_spec.model_type})")
    tokenizer = Backend(_unigram(model) if model.trainer_spec.model_type == UNIGRAM else _bpe(model))
    tokenizer.normalizer = _normalizer(model)
    scheme = "always" if model.normalizer_spec.add_dummy_prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    if model.trainer_spec.byte_fallback:
        # Not by the Metaspace decoder: it takes every blank off a first piece, and behind Fuse the whole text is one.
        first_blank = [decoders.Strip(" ", 1, 0)] if model.normalizer_spec.add_dummy_prefix else []
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *first_blank]
        tokenizer.decoder = decoders.Sequence(steps)
    else:
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _wrap_sentencepiece(tokenizer, model)


def _read_model(path: Path) -> Any:
    """The file's content, read by protobuf (which tensorboard brings along) after transformers' copy of its schema."""
    try:
        from transformers.convert_slow_tokenizer import import_protobuf

        schema: Any = import_protobuf()
    except ImportError as error:
        raise UserError(f"{path}: reading it needs one more package; pip install protobuf ({error})") from error
    model = schema.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's own type, which moves between its versions
        raise UserError(f"{path}: not a SentencePiece model: {error}") from error
    if not model.pieces:
        raise UserError(f"{path}: not a SentencePiece model: no pieces in it")
    longest = max(len(piece.piece) for piece in model.pieces)
    if longest > MAX_PIECE:  # every way to cut a piece in two is tried
        raise UserError(f"{path}: a piece has {longest} characters; {MAX_PIECE} are allowed")
    return model


def _unigram(model: Any) -> Any:
    highest = max(piece.score for piece in model.pieces if piece.type not in (CONTROL, USER_DEFINED))
    vocabulary = [
        # as SentencePiece does: above whatever else would fit
        (piece.piece, len(piece.piece.encode()) * highest - 0.1 if piece.type == USER_DEFINED else piece.score)
        for piece in model.pieces
    ]
    spec = model.trainer_spec
    return models.Unigram(vocab=vocabulary, unk_id=spec.unk_id, byte_fallback=spec.byte_fallback)


def _bpe(model: Any) -> Any:
    """SentencePiece merges the neighbors that make the best piece: each way to cut a piece in two is a merge."""
    ids = {piece.piece: number for number, piece in enumerate(model.pieces)}
    ranked = sorted(model.pieces, key=lambda piece: -piece.score)  # stable: equal scores keep the file's order
    merges = [
        (piece.piece[:cut], piece.piece[cut:])
        for piece in ranked
        for cut in range(1, len(piece.piece))
        if piece.type not in (CONTROL, USER_DEFINED) and piece.piece[:cut] in ids and piece.piece[cut:] in ids
    ]
    return models.BPE(
        vocab=ids,
        merges=merges,
        unk_token=model.trainer_spec.unk_piece,
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
    )


def _normalizer(model: Any) -> Any:
    spec, steps = model.normalizer_spec, []
    if _is_folded([piece.piece for piece in model.pieces]):
        steps += [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(left=True, right=True), normalizers.Replace(Regex(" {2,}"), " ")]
    return normalizers.Sequence(steps)


def _wrap_sentencepiece(tokenizer: Backend, model: Any) -> Tokenizer:
    spec, kinds = model.trainer_spec, {piece.piece: piece.type for piece in model.pieces}
    tokenizer.add_special_tokens([piece for piece, kind in kinds.items() if kind == CONTROL])
    if spec.model_type == BPE:  # its merges know no score, so such pieces are cut out beforehand
        own = [piece for piece, kind in kinds.items() if kind == USER_DEFINED]
        tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in own])
    if all(mark in kinds for mark in BERT_TOKENS[2:]) and spec.pad_id >= 0:
        special = (model.pieces[spec.pad_id].piece, spec.unk_piece, *BERT_TOKENS[2:])
        return wrap_bert(tokenizer, special, clean_up=False)
    names = {"bos_token": spec.bos_id, "eos_token": spec.eos_id, "pad_token": spec.pad_id, "unk_token": spec.unk_id}
    return wrap(
        tokenizer,
        **{name: model.pieces[number].piece for name, number in names.items() if number >= 0},
    )
