"""Tokenizers trained on texts, one function per kind.

All are transformers' `PreTrainedTokenizerFast`: tokenizer.json describes them fully, no class of this library is needed.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.data.tokenizers.wrap import BERT_TOKENS, T5_TOKENS, bert_pipeline, wrap, wrap_bert, wrap_t5
from alignment.errors import UserError

TokenizerKind = Literal["bpe", "wordpiece", "unigram", "bytes", "characters"]
CHARACTER_TOKENS = ("</s>", "<pad>", "<unk>")
SIZED = ("bpe", "wordpiece", "unigram")  # kinds whose vocabulary size is a setting


def train_tokenizer(
    kind: TokenizerKind, texts: Iterable[str], vocabulary: int | None = None, **options: Any
) -> Tokenizer:
    """A tokenizer of the given kind fitted to the texts.

    Args:
        kind: "bpe" (byte-level, as GPT-2), "wordpiece" (BERT), "unigram" (T5, ALBERT), "bytes" (ByT5) or "characters".
        texts: read once, in order; bytes need none.
        vocabulary: tokens in all, special ones and sentinels among them. Bytes and characters have a size of their own
            and take None.
        options: further arguments of the kind's own function, such as `sentinels` or `lowercase`.

    Raises:
        UserError: an unknown kind, an option it does not have, or a vocabulary that cannot be.
    """
    if kind not in KINDS:
        raise UserError(f"unknown kind of tokenizer {kind!r}; known: {', '.join(KINDS)}")
    if kind in SIZED and vocabulary is None:
        raise UserError(f"a {kind} tokenizer needs the size of its vocabulary")
    if kind not in SIZED and vocabulary is not None:
        raise UserError(f"the vocabulary of a {kind} tokenizer has a size of its own; leave {vocabulary} out")
    try:
        return KINDS[kind](texts, *([vocabulary] if kind in SIZED else []), **options)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise UserError(f"a {kind} tokenizer has no such option: {str(error).rpartition('argument ')[2]}") from error


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str] = ("<s>", "</s>", "<pad>"),
    chat_template: str | None = None,
) -> Tokenizer:
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
    if len(set(special_tokens)) < max(3, len(special_tokens)):
        raise UserError(f"special_tokens needs BOS, EOS and PAD first and no word twice, got {list(special_tokens)}")
    if vocab_size < 256 + len(special_tokens):
        raise UserError(
            f"vocab_size {vocab_size} is too small: 256 bytes and {len(special_tokens)} special tokens need "
            f"{256 + len(special_tokens)}"
        )
    tokenizer = Backend(models.BPE())
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
    fast = wrap(
        tokenizer, f"{bos} $A", f"{bos} $A {bos} $B",
        added=(bos,), bos_token=bos, eos_token=eos, pad_token=pad, extra_special_tokens=others,
    )  # fmt: skip
    fast.chat_template = chat_template
    return fast


def train_wordpiece(texts: Iterable[str], vocabulary: int, *, lowercase: bool = True) -> Tokenizer:
    """BERT's kind: words, cut greedily into the longest known pieces; pieces within a word begin with ##.

    The first ids are [PAD] [UNK] [CLS] [SEP] [MASK]. A text becomes [CLS] A [SEP], a pair [CLS] A [SEP] B [SEP] with
    type ids 0 and 1.

    Args:
        lowercase: write all letters small and without accents, as the uncased BERT does.

    Raises:
        UserError: the vocabulary has no room for the texts' characters.

    Source: Devlin et al. 2019, arXiv:1810.04805; Wu et al. 2016, arXiv:1609.08144, section 4.1.
    """
    texts = list(texts)
    pipeline = bert_pipeline(Backend(models.WordPiece(unk_token="[UNK]")), lowercase=lowercase)
    # The trainer numbers the pieces ##a, ##b, ... as its hash table yields them, and breaks ties by number: two runs
    # differ. Named beforehand they have the same numbers each time.
    inner = [f"##{character}" for character in _inner_characters(pipeline, texts)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary,
        special_tokens=[*BERT_TOKENS, *inner],
        continuing_subword_prefix="##",
        show_progress=False,
    )
    pipeline.train_from_iterator(texts, trainer)
    if pipeline.get_vocab_size() > vocabulary:  # the trainer keeps every character, whatever it was asked for
        raise UserError(
            f"a wordpiece vocabulary of {vocabulary} is too small: the texts' characters and the special tokens alone "
            f"need {pipeline.get_vocab_size()}; ask for more, or train a byte-level one (kind bpe)"
        )
    model = models.WordPiece(vocab=pipeline.get_vocab(), unk_token="[UNK]", max_input_chars_per_word=100)
    return wrap_bert(bert_pipeline(Backend(model), lowercase=lowercase))


def _inner_characters(pipeline: Backend, texts: Iterable[str]) -> list[str]:
    """Characters that occur in words after their first one, in the order of their code points."""
    normalizer, cutter = pipeline.normalizer, pipeline.pre_tokenizer
    assert normalizer is not None and cutter is not None
    words = {word for text in texts for word, _ in cutter.pre_tokenize_str(normalizer.normalize_str(text))}
    return sorted({character for word in words for character in word[1:]})


def train_unigram(texts: Iterable[str], vocabulary: int, *, sentinels: int = 0, lowercase: bool = False) -> Tokenizer:
    """SentencePiece's kind: a blank is part of the word after it, the cut is the likeliest under a unigram model.

    The first ids are <pad> </s> <unk>, as T5's; the end token follows each text. NFKC, runs of blanks become one.

    Args:
        sentinels: number of T5's <extra_id_0>, <extra_id_1>, ...; they take the last ids, <extra_id_0> the very last.
        lowercase: write all letters small.

    Raises:
        UserError: the vocabulary has no room for the sentinels or the texts' characters.

    Source: Kudo 2018, arXiv:1804.10959; sentinels: Raffel et al. 2020, arXiv:1910.10683, section 3.1.4.
    """
    pieces = vocabulary - sentinels
    if pieces <= len(T5_TOKENS):
        raise UserError(
            f"a vocabulary of {vocabulary} has no room for {sentinels} sentinels and {len(T5_TOKENS)} marks"
        )
    tokenizer = Backend(models.Unigram())
    steps = [normalizers.NFKC(), *([normalizers.Lowercase()] if lowercase else [])]
    tokenizer.normalizer = normalizers.Sequence(
        [*steps, normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip(left=False, right=True)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=pieces, special_tokens=list(T5_TOKENS), unk_token="<unk>", show_progress=False
    )
    try:
        tokenizer.train_from_iterator(texts, trainer)
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(f"a unigram vocabulary of {vocabulary} ({sentinels} sentinels) cannot be: {error}") from error
    tokenizer.model = _in_order(tokenizer)
    return wrap_t5(tokenizer, [f"<extra_id_{number}>" for number in reversed(range(sentinels))])


def _in_order(tokenizer: Backend) -> Any:
    """The unigram model, the same at each training: the trainer leaves some things to the order of its hash tables.

    The last digits of a score change with the order of summing, so scores are rounded and equal ones sorted by piece.
    Characters that no likely piece holds get the lowest score and a step of 0.0001 each, in any order: here no step.
    """
    vocabulary = [(piece, round(score, 6)) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]]
    special, pieces = vocabulary[: len(T5_TOKENS)], vocabulary[len(T5_TOKENS) :]
    lowest = min(score for _, score in pieces)
    reach = lowest + 1e-4 * sum(len(piece) == 1 for piece, _ in pieces)
    levelled = [(piece, lowest if len(piece) == 1 and score <= reach else score) for piece, score in pieces]
    ordered = sorted(levelled, key=lambda item: (-item[1], item[0]))
    return models.Unigram(vocab=[*special, *ordered], unk_id=T5_TOKENS.index("<unk>"), byte_fallback=False)


def byte_tokenizer(texts: Iterable[str] = (), *, sentinels: int = 125) -> Tokenizer:
    """ByT5's kind: a token is a byte of the text's UTF-8, its id the byte + 3; <pad> </s> <unk> are 0 1 2.

    The end token follows each text.

    Args:
        texts: not read; there is nothing to fit.
        sentinels: <extra_id_0>, <extra_id_1>, ... from id 259 upwards, as in transformers' tokenizer. (The released
            ByT5 was trained with the ids 258, 257, ... as sentinels, which here are bytes that UTF-8 never uses.)

    Source: Xue et al. 2022, arXiv:2105.13626, section 3.1.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    pieces = {token: number for number, token in enumerate(T5_TOKENS)}
    pieces |= {character: len(T5_TOKENS) + byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Backend(models.BPE(vocab=pieces, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrap_t5(tokenizer, [f"<extra_id_{number}>" for number in range(sentinels)])


def train_characters(texts: Iterable[str]) -> Tokenizer:
    """One token per character (code point) that occurs in the texts, in the order of their code points.

    The first ids are </s> <pad> <unk>; nothing is put around a text. A character that did not occur becomes <unk>.

    Raises:
        UserError: no character at all.

    Source: Karpathy 2015, "The unreasonable effectiveness of recurrent neural networks" (character-level modeling).
    """
    characters = sorted(set().union(*map(set, texts)))
    if not characters:
        raise UserError("no text, so no characters to make a vocabulary of")
    end, pad, unknown = CHARACTER_TOKENS
    ids = {token: number for number, token in enumerate([*CHARACTER_TOKENS, *characters])}
    tokenizer = Backend(models.WordLevel(vocab=ids, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return wrap(tokenizer, eos_token=end, pad_token=pad, unk_token=unknown)


KINDS: dict[str, Callable[..., Tokenizer]] = {
    "bpe": train_bpe,
    "wordpiece": train_wordpiece,
    "unigram": train_unigram,
    "bytes": byte_tokenizer,
    "characters": train_characters,
}
