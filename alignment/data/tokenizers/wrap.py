"""Tokenizers of the tokenizers library in transformers' form, with the special tokens of BERT, of T5 or a BOS."""

from collections.abc import Sequence
from typing import Any, cast

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from alignment.data.tokenizers.tokenizer import Tokenizer

BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
T5_TOKENS = ("<pad>", "</s>", "<unk>")


def wrap(
    tokenizer: Backend, single: str = "", pair: str = "", *, added: Sequence[str] = (), **options: Any
) -> Tokenizer:
    """The tokenizer in transformers' form.

    Args:
        single, pair: templates of a text $A and of a pair of texts $A, $B, as `TemplateProcessing` takes them.
        added: special tokens in the templates.
        options: of `PreTrainedTokenizerFast`: the names of the special tokens, whether decoding cleans up blanks.
    """
    from transformers import PreTrainedTokenizerFast

    if single:
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[call-arg]
            single=single, pair=pair, special_tokens=[(token, tokenizer.token_to_id(token)) for token in added]
        )
    options = {"clean_up_tokenization_spaces": False, **options}
    return cast("Tokenizer", PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options))


def bert_pipeline(tokenizer: Backend, *, lowercase: bool) -> Backend:
    """Set BERT's normalization and pre-tokenization: clean, fold, cut at blanks, punctuation and Chinese characters.

    Args:
        lowercase: fold to lower case and strip accents.

    Returns:
        The same tokenizer.
    """
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    tokenizer.decoder = decoders.WordPiece(prefix="##")  # type: ignore[assignment]
    return tokenizer


def wrap_bert(tokenizer: Backend, special: Sequence[str] = BERT_TOKENS, *, clean_up: bool = True) -> Tokenizer:
    """The tokenizer in transformers' form; a text is [CLS] A [SEP], a pair [CLS] A [SEP] B [SEP] with types 0 and 1.

    Args:
        special: its tokens for [PAD], [UNK], [CLS], [SEP] and [MASK], all in the vocabulary.
        clean_up: decode "don ' t ." to "don't.", as WordPiece does not know where blanks were.
    """
    pad, unknown, first, separator, mask = special
    return wrap(
        tokenizer,
        f"{first}:0 $A:0 {separator}:0",
        f"{first}:0 $A:0 {separator}:0 $B:1 {separator}:1",
        added=(first, separator),
        pad_token=pad,
        unk_token=unknown,
        cls_token=first,
        sep_token=separator,
        mask_token=mask,
        clean_up_tokenization_spaces=clean_up,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def wrap_t5(tokenizer: Backend, sentinels: Sequence[str]) -> Tokenizer:
    """The tokenizer in transformers' form, the end token after each text, the sentinels added in the order given."""
    pad, end, unknown = T5_TOKENS
    tokenizer.add_special_tokens([pad, end, unknown, *sentinels])
    names = sorted(sentinels, key=lambda name: int(name.strip("<>").rpartition("_")[2]))
    return wrap(
        tokenizer, f"$A {end}", f"$A {end} $B {end}",
        added=(end,), eos_token=end, pad_token=pad, unk_token=unknown, extra_special_tokens=names,
    )  # fmt: skip
