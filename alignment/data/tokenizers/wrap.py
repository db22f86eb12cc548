"""How well-known tokenizers cut and frame a text: BERT's and T5's, and any with a BOS, in transformers' form.

What a vocabulary holds is decided elsewhere: fitted in train_tokenizers.py, read in raw_tokenizers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

BERT_MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
T5_MARKS = ("<pad>", "</s>", "<unk>")


def wrap_bos(
    tokenizer: Tokenizer, *, bos: str, eos: str, pad: str, others: Sequence[str] = (), add_bos: bool
) -> PreTrainedTokenizerFast:
    """The tokenizer in transformers' form; BOS is added by a template post-processor where asked for."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[call-arg]
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        extra_special_tokens=list(others),
        clean_up_tokenization_spaces=False,
    )


def bert_pipeline(tokenizer: Tokenizer, *, lowercase: bool) -> Tokenizer:
    """Give a WordPiece model BERT's way to words: clean, fold, cut at blanks, punctuation and Chinese characters.

    Args:
        lowercase: write all letters small and without accents.

    Returns:
        The same tokenizer.
    """
    from tokenizers import decoders, normalizers, pre_tokenizers

    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    tokenizer.decoder = decoders.WordPiece(prefix="##")  # type: ignore[assignment]
    return tokenizer


def wrap_bert(
    tokenizer: Tokenizer, marks: Sequence[str] = BERT_MARKS, *, clean_up: bool = True
) -> PreTrainedTokenizerFast:
    """The tokenizer in transformers' form; a text is [CLS] A [SEP], a pair [CLS] A [SEP] B [SEP] with types 0 and 1.

    Args:
        marks: its words for [PAD], [UNK], [CLS], [SEP] and [MASK], all in the vocabulary.
        clean_up: decode "don ' t ." to "don't.", as WordPiece does not know where blanks were.
    """
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    pad, unknown, first, separator, mask = marks
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[call-arg]
        single=f"{first}:0 $A:0 {separator}:0",
        pair=f"{first}:0 $A:0 {separator}:0 $B:1 {separator}:1",
        special_tokens=[(mark, tokenizer.token_to_id(mark)) for mark in (first, separator)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        unk_token=unknown,
        cls_token=first,
        sep_token=separator,
        mask_token=mask,
        clean_up_tokenization_spaces=clean_up,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def wrap_t5(tokenizer: Tokenizer, sentinels: Sequence[str]) -> PreTrainedTokenizerFast:
    """The tokenizer in transformers' form, the end token after each text, the sentinels added in the order given."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    pad, end, unknown = T5_MARKS
    tokenizer.add_special_tokens([pad, end, unknown, *sentinels])
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[call-arg]
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=pad,
        unk_token=unknown,
        extra_special_tokens=sorted(sentinels, key=lambda name: int(name.strip("<>").rpartition("_")[2])),
        clean_up_tokenization_spaces=False,
    )
