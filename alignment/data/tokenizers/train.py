"""Tokenizers trained on texts, one function per kind.

All are transformers' `PreTrainedTokenizerFast`: tokenizer.json describes them fully, no class of this library is
needed.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from alignment.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TokenizerKind = Literal["bpe", "wordpiece", "unigram", "bytes", "characters"]
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BERT_NAMES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
T5_TOKENS = ("<pad>", "</s>", "<unk>")
SIZED = ("bpe", "wordpiece", "unigram")  # kinds whose vocabulary size is a setting


def wrap(
    tokenizer: Backend, single: str = "", pair: str = "", *, added: Sequence[str] = (), **options: Any
) -> "PreTrainedTokenizerFast":
    """The tokenizer in transformers' form; `single`, `pair`: of `TemplateProcessing`; `added`: their special tokens."""
    from transformers import PreTrainedTokenizerFast

    if single:
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[call-arg]
            single=single, pair=pair, special_tokens=[(token, tokenizer.token_to_id(token)) for token in added]
        )
    options = {"clean_up_tokenization_spaces": False, **options}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def byte_level(tokenizer: Backend, **options: Any) -> Backend:
    """The tokenizer reading and writing texts as GPT-2's characters for bytes."""
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def bert_pipeline(tokenizer: Backend, *, lowercase: bool) -> Backend:
    """The tokenizer with BERT's normalizer and words: clean, fold, cut at blanks, punctuation, Chinese characters."""
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    tokenizer.decoder = decoders.WordPiece(prefix="##")  # type: ignore[assignment]
    return tokenizer


def wordpiece(ids: dict[str, int], *, lowercase: bool) -> "PreTrainedTokenizerFast":
    """BERT's tokenizer of a vocabulary; a text is [CLS] A [SEP], a pair [CLS] A [SEP] B [SEP] with types 0 and 1."""
    model = models.WordPiece(vocab=ids, unk_token="[UNK]", max_input_chars_per_word=100)
    return wrap(
        bert_pipeline(Backend(model), lowercase=lowercase),
        "[CLS]:0 $A:0 [SEP]:0",
        "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        added=("[CLS]", "[SEP]"),
        **dict(zip(BERT_NAMES, BERT_TOKENS, strict=True)),
        clean_up_tokenization_spaces=True,  # "don ' t ." to "don't.": WordPiece does not know where blanks were
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def wrap_t5(tokenizer: Backend, sentinels: Sequence[int]) -> "PreTrainedTokenizerFast":
    """The tokenizer in transformers' form, the end token after each text, the sentinels added in the order given."""
    tokenizer.add_special_tokens([*T5_TOKENS, *(f"<extra_id_{sentinel}>" for sentinel in sentinels)])
    return wrap(
        tokenizer,
        "$A </s>",
        "$A </s> $B </s>",
        added=("</s>",),
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=[f"<extra_id_{sentinel}>" for sentinel in sorted(sentinels)],
    )


def train_tokenizer(
    kind: TokenizerKind, texts: Iterable[str], vocabulary: int | None = None, **options: Any
) -> "PreTrainedTokenizerFast":
    """A tokenizer of the given kind fitted to the texts.

    Args:
        kind: "bpe" (byte-level, as GPT-2), "wordpiece" (BERT), "unigram" (T5, ALBERT), "bytes" (ByT5) or "characters".
        vocabulary: tokens in all, special ones and sentinels among them; None for bytes and characters.
        options: further arguments of the kind's own function, such as `sentinels` or `lowercase`.
    """
    if (kind in SIZED) != (vocabulary is not None):
        raise UserError(f"{', '.join(SIZED)} need the size of their vocabulary, others have one of their own")
    return KINDS[kind](texts, *([vocabulary] if kind in SIZED else []), **options)


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str] = ("<s>", "</s>", "<pad>"),
    chat_template: str | None = None,
) -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer fitted to the texts; it puts BOS before every text.

    The special tokens (BOS, EOS, PAD, then any others) take the first ids. Few texts may give fewer tokens than asked
    for.

    Source: Sennrich et al. 2016, arXiv:1508.07909; on bytes as in Radford et al. 2019 (GPT-2).
    """
    if len(set(special_tokens)) < max(3, len(special_tokens)):
        raise UserError(f"special_tokens needs BOS, EOS and PAD first and no word twice, got {list(special_tokens)}")
    if vocab_size < 256 + len(special_tokens):
        raise UserError(
            f"vocab_size {vocab_size} is too small: 256 bytes and {len(special_tokens)} special tokens need "
            f"{256 + len(special_tokens)}"
        )
    tokenizer = byte_level(Backend(models.BPE()))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos, eos, pad, *others = special_tokens
    fast = wrap(
        tokenizer,
        f"{bos} $A",
        f"{bos} $A {bos} $B",
        added=(bos,),
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        extra_special_tokens=others,
    )
    fast.chat_template = chat_template
    return fast


def train_wordpiece(texts: Iterable[str], vocabulary: int, *, lowercase: bool = True) -> "PreTrainedTokenizerFast":
    """BERT's kind: words, cut greedily into the longest known pieces; pieces within a word begin with ##.

    Source: Devlin et al. 2019, arXiv:1810.04805; Wu et al. 2016, arXiv:1609.08144, section 4.1.
    """
    texts = list(texts)
    pipeline = bert_pipeline(Backend(models.WordPiece(unk_token="[UNK]")), lowercase=lowercase)
    # The trainer numbers the pieces ##a, ##b, ... as its hash table yields them, and breaks ties by number: two runs
    # differ. Named beforehand they have the same numbers each time.
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    cutter = pre_tokenizers.BertPreTokenizer()
    words = {word for text in texts for word, _ in cutter.pre_tokenize_str(normalizer.normalize_str(text))}
    inner = sorted({f"##{character}" for word in words for character in word[1:]})
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
    return wordpiece(pipeline.get_vocab(), lowercase=lowercase)


def train_unigram(
    texts: Iterable[str], vocabulary: int, *, sentinels: int = 0, lowercase: bool = False
) -> "PreTrainedTokenizerFast":
    """SentencePiece's kind: a blank is part of the word after it, the cut is the likeliest under a unigram model.

    T5's sentinels <extra_id_0>, <extra_id_1>, ... take the last ids, <extra_id_0> the very last.

    Source: Kudo 2018, arXiv:1804.10959; sentinels: Raffel et al. 2020, arXiv:1910.10683, section 3.1.4.
    """
    tokenizer = Backend(models.Unigram())
    steps = [normalizers.NFKC(), *([normalizers.Lowercase()] if lowercase else [])]
    tokenizer.normalizer = normalizers.Sequence(
        [*steps, normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip(left=False, right=True)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    try:
        trainer = trainers.UnigramTrainer(
            vocab_size=vocabulary - sentinels, special_tokens=list(T5_TOKENS), unk_token="<unk>", show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(
            f"cannot train a unigram vocabulary of {vocabulary} tokens ({sentinels} sentinels): {error}"
        ) from error
    tokenizer.model = _in_order(tokenizer)
    return wrap_t5(tokenizer, range(sentinels)[::-1])


def _in_order(tokenizer: Backend) -> Any:
    """The unigram model, the same at each training: the trainer leaves some things to the order of its hash tables.

    The last digits of a score change with the order of summing, so scores are rounded and equal ones sorted by piece.
    Characters that no likely piece holds get the lowest score and a step of 0.0001 each, in any order: here no step.
    """
    vocabulary = [(piece, round(score, 6)) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]]
    special = vocabulary[: len(T5_TOKENS)]
    pieces = vocabulary[len(T5_TOKENS) :]
    lowest = min(score for _, score in pieces)
    reach = lowest + 1e-4 * sum(len(piece) == 1 for piece, _ in pieces)
    levelled = [(piece, lowest if len(piece) == 1 and score <= reach else score) for piece, score in pieces]
    ordered = sorted(levelled, key=lambda item: (-item[1], item[0]))
    return models.Unigram(vocab=[*special, *ordered], unk_id=T5_TOKENS.index("<unk>"), byte_fallback=False)


def byte_tokenizer(texts: Iterable[str] = (), *, sentinels: int = 125) -> "PreTrainedTokenizerFast":
    """ByT5's kind: a token is a byte of the text's UTF-8, its id the byte + 3; <extra_id_0>, ... follow from id 259.

    Source: Xue et al. 2022, arXiv:2105.13626, section 3.1.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    pieces = {token: token_id for token_id, token in enumerate(T5_TOKENS)}
    pieces |= {character: len(T5_TOKENS) + byte for byte, character in bytes_to_unicode().items()}
    tokenizer = byte_level(Backend(models.BPE(vocab=pieces, merges=[], unk_token="<unk>")), use_regex=False)
    return wrap_t5(tokenizer, range(sentinels))


def train_characters(texts: Iterable[str]) -> "PreTrainedTokenizerFast":
    """One token per character (code point) that occurs in the texts; nothing is put around a text.

    Source: Karpathy 2015, "The unreasonable effectiveness of recurrent neural networks" (character-level modeling).
    """
    characters = sorted(set().union(*map(set, texts)))
    if not characters:
        raise UserError("no text, so no characters to make a vocabulary of")
    ids = {token: token_id for token_id, token in enumerate(["</s>", "<pad>", "<unk>", *characters])}
    tokenizer = Backend(models.WordLevel(vocab=ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return wrap(tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


KINDS: dict[str, Callable[..., "PreTrainedTokenizerFast"]] = {
    "bpe": train_bpe,
    "wordpiece": train_wordpiece,
    "unigram": train_unigram,
    "bytes": byte_tokenizer,
    "characters": train_characters,
}
