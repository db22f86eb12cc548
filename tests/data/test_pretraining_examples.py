"""Examples and batches of pretraining objectives: targets, differences between epochs, and none between micro-batches."""

import numpy as np
import pytest
import torch

from alignment.data.pretraining.corruption import (
    EpochStream,
    Masking,
    delete_tokens,
    fixed_seed_rows,
    permute_sentences,
    split_prefix,
)
from alignment.data.pretraining.prepare import (
    collate_in_one,
    collate_masked,
    collate_seq2seq,
    denoising,
    mask_tokens_of,
    prefix_modeling,
    span_corruption,
    tokenize_for_corruption,
    tokenize_plain,
)
from alignment.data.rows.records import Text
from alignment.data.stream import Stream
from alignment.data.table import mask_of
from alignment.data.text.special_tokens import bos_adder, sentinel_ids, special_token_template
from alignment.data.tokenize import even_slices
from alignment.data.tokenizers.train import train_bpe, train_tokenizer
from alignment.errors import UserError

WORDS = ["the", "unbelievable", "cat", "sat", "on", "the", "mat", "and", "watched", "another", "remarkable", "cat"]
TEXTS = [" ".join(WORDS[k % 12] for k in range(n, n + 3 + n % 17)) for n in range(30)]
ROWS = [Text(text, f"row {number}") for number, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def wordpiece():
    return train_tokenizer("wordpiece", TEXTS, 60)


@pytest.fixture(scope="module")
def unigram():
    return train_tokenizer("unigram", TEXTS, 60, sentinels=20)


def starts_of(example):
    return mask_of(example.values["word_starts"])


def documents(batches):
    """row id -> (ids, targets within the document, labels) of masked batches."""
    found = {}
    for batch in batches:
        for row, (start, stop) in enumerate(zip(batch.starts.tolist(), batch.starts.tolist()[1:], strict=False)):
            own = batch.target_rows == row
            found[batch.row_ids[row]] = (
                batch.tokens[start:stop].tolist(),
                (batch.target_index[own] - start).tolist(),
                batch.labels[own].tolist(),
            )
    return found


def test_a_text_is_encoded_and_its_words_begin_where_the_tokenizer_says(wordpiece):
    [example], counts = tokenize_for_corruption([Text("unbelievable cats [SEP]", "a")], wordpiece, 64)
    tokens = wordpiece.convert_ids_to_tokens(example.ids)
    assert (tokens[0], tokens[-1]) == ("[CLS]", "[SEP]")
    assert tokens.count("[SEP]") == 1  # the one typed in the text is spelt out
    assert example.mask == [False, *[True] * (len(tokens) - 2), False]
    assert starts_of(example)[1:-1] == [not token.startswith("##") for token in tokens[1:-1]]
    assert (counts.kept, counts.documents, counts.tokens) == (1, 1, len(tokens))


def test_targets_are_corrupted_positions_with_the_old_tokens_as_labels(wordpiece):
    examples, _ = tokenize_for_corruption(ROWS, wordpiece, 64)
    mask_tokens = mask_tokens_of(wordpiece)
    batches = collate_masked(fixed_seed_rows(examples), 100, masking=Masking(), mask_tokens=mask_tokens)
    special = set(wordpiece.all_special_ids)
    assert all(batch.weight == len(batch.target_index) == len(batch.labels) for batch in batches)
    assert all(len(batch.tokens) <= 100 for batch in batches)
    found = documents(batches)
    assert set(found) == {row.row_id for row in ROWS}
    for example in examples:
        ids, positions, labels = found[example.row_id]
        assert labels == [example.ids[position] for position in positions] and labels
        assert special.isdisjoint(labels)
        assert len(positions) == max(1, round(0.15 * (len(ids) - 2)))
        assert all(a == b for n, (a, b) in enumerate(zip(ids, example.ids, strict=True)) if n not in positions)


def test_masks_do_not_depend_on_ranks_or_micro_batches_but_on_the_epoch(wordpiece):
    examples, _ = tokenize_for_corruption(ROWS, wordpiece, 64)
    mask_tokens = mask_tokens_of(wordpiece)
    stream = EpochStream(Stream(examples, batch_size=10, seed=3))

    def seen(step, tokens, ranks):
        rows = stream.rows_at(step)
        parts = [
            collate_masked(rows[rank::ranks], tokens, masking=Masking(), mask_tokens=mask_tokens)
            for rank in range(ranks)
        ]
        return documents([batch for part in parts for batch in part])

    assert seen(1, 1000, 1) == seen(1, 30, 1) == seen(1, 60, 3)
    first = {name: value for step in range(3) for name, value in seen(step, 1000, 1).items()}
    second = {name: value for step in range(3, 6) for name, value in seen(step, 1000, 1).items()}
    assert set(first) == set(second)
    assert sum(first[name] != second[name] for name in first) > len(first) / 2


def test_rows_of_a_batch_across_an_epochs_end_have_both_epochs():
    stream = EpochStream(Stream(list("abc"), batch_size=2, seed=0))
    assert [row.epoch for step in range(3) for row in stream.rows_at(step)] == [0, 0, 0, 1, 1, 1]
    assert sorted(row.row for row in stream.rows_at(0) + stream.rows_at(1)[:1]) == ["a", "b", "c"]
    [one, two] = stream.rows_at(0)
    assert one.generator().random() == one.generator().random() != two.generator().random()


def test_long_texts_are_cut_into_even_parts_that_lose_nothing(wordpiece):
    assert [(part.start, part.stop) for part in even_slices(10, 4)] == [(0, 3), (3, 6), (6, 10)]
    for length in range(1, 50):
        for most in range(3, 9):
            parts = even_slices(length, most)
            assert [n for part in parts for n in range(part.start, part.stop)] == list(range(length))
            assert len(parts) == -(-length // most)
            assert all(part.stop - part.start <= most for part in parts)
            assert length == 1 or min(part.stop - part.start for part in parts) >= 2
    whole, _ = tokenize_for_corruption([Text(" ".join(TEXTS), "a")], wordpiece, 10_000)
    parts, counts = tokenize_for_corruption([Text(" ".join(TEXTS), "a")], wordpiece, 16)
    assert [token for part in parts for token in part.ids[1:-1]] == whole[0].ids[1:-1]
    assert all(len(part.ids) <= 16 and starts_of(part)[1] for part in parts)
    assert sum(counts.cut.values()) == 1


def test_a_tokenizer_without_mask_token_is_refused_and_bpe_can_have_one():
    with pytest.raises(UserError, match="no mask token"):
        mask_tokens_of(train_bpe(TEXTS, 300))
    roberta = train_bpe(TEXTS, 300, ("<s>", "</s>", "<pad>", "<mask>"))
    mask_tokens = mask_tokens_of(roberta)
    assert mask_tokens.mask_id == 3
    assert {0, 1, 2, 3}.isdisjoint(mask_tokens.random_ids.tolist())
    assert len(mask_tokens.random_ids) == len(roberta) - 4
    [example], _ = tokenize_for_corruption([Text("the cat sat", "a")], roberta, 64)
    assert sum(starts_of(example)) == 3


def test_no_room_for_text_is_refused(wordpiece, unigram):
    with pytest.raises(UserError, match="no room"):
        tokenize_for_corruption(ROWS, wordpiece, 2)
    with pytest.raises(UserError, match="no room"):
        tokenize_plain(ROWS, unigram, 3)


def sides(batches):
    """row id -> (source ids, target ids)."""
    found = {}
    for batch in batches:
        parts = [torch.split(side.tokens, side.lengths) for side in (batch.encoder, batch.decoder)]
        for name, source, target in zip(batch.encoder.row_ids, *parts, strict=True):
            found[name] = (source.tolist(), target.tolist())
    return found


def test_span_corruption_batches_hold_every_token_once(unigram):
    examples, _ = tokenize_plain(ROWS, unigram, 200)
    corrupt, start = span_corruption(unigram, examples), unigram.pad_token_id
    batches = collate_seq2seq(fixed_seed_rows(examples), 150, corrupt=corrupt, start_id=start)
    assert all(len(b.encoder.tokens) + len(b.decoder.tokens) <= 150 or len(b.encoder.lengths) == 1 for b in batches)
    sentinels = sentinel_ids(unigram)
    assert sentinels == list(range(len(unigram) - 1, len(unigram) - 21, -1))
    found = sides(batches)
    for example in examples:
        source, target = found[example.row_id]
        assert source[-1] == target[-1] == unigram.eos_token_id
        assert target[:2] == [start, sentinels[0]]
        texts = [token for token in source[:-1] + target[1:-1] if token not in sentinels]
        assert sorted(texts) == sorted(example.ids)
    for batch in batches:
        assert batch.weight == sum(length - 1 for length in batch.decoder.lengths)
        assert len(batch.encoder.target_index) == 0
        assert batch.decoder.positions[batch.decoder.target_index].min() == 1


def test_the_source_is_never_longer_than_max_length(unigram):
    for longest in range(4, 40):
        examples, _ = tokenize_plain([Text(" ".join(TEXTS), "a")], unigram, longest)
        corrupt = span_corruption(unigram, examples)
        batches = collate_seq2seq(fixed_seed_rows(examples), 10_000, corrupt=corrupt, start_id=0)
        assert max(length for batch in batches for length in batch.encoder.lengths) <= longest


def test_too_few_sentinels_are_refused_before_training(unigram):
    examples, _ = tokenize_plain([Text(" ".join(TEXTS), "a")], unigram, 1000)
    with pytest.raises(UserError, match=r"has 20 sentinels .* takes \d+; lower data.max_length"):
        span_corruption(unigram, examples)


def test_prefix_modeling_reads_the_beginning_and_writes_the_rest(unigram):
    examples, _ = tokenize_plain(ROWS, unigram, 200)
    found = sides(collate_seq2seq(fixed_seed_rows(examples), 200, corrupt=prefix_modeling(unigram), start_id=0))
    for example in examples:
        source, target = found[example.row_id]
        assert source[:-1] + target[1:-1] == example.ids
        assert len(source) >= 2 and len(target) >= 3


@pytest.mark.parametrize("prefix_mask", [True, False])
def test_a_decoder_reads_source_and_target_as_one_document(prefix_mask, bpe):
    examples, _ = tokenize_plain(ROWS, bpe, 200)
    options = {"corrupt": prefix_modeling(bpe), "with_bos": bos_adder(bpe), "prefix_mask": prefix_mask}
    batches = collate_in_one(fixed_seed_rows(examples), 150, **options)
    cuts = {example.row_id: len(split_prefix(example.ids, row.generator())[0])
            for example, row in zip(examples, fixed_seed_rows(examples), strict=True)}  # fmt: skip
    texts = {example.row_id: [bpe.bos_token_id, *example.ids, bpe.eos_token_id] for example in examples}
    for batch in batches:
        assert len(batch.tokens) <= 150
        prefixes = torch.tensor([1 + cuts[name] for name in batch.row_ids])
        documents = torch.split(batch.tokens, batch.lengths)
        assert [document.tolist() for document in documents] == [texts[name] for name in batch.row_ids]
        after = (batch.positions >= prefixes.repeat_interleave(batch.sizes)).nonzero().squeeze(1)
        assert torch.equal(batch.target_index, after) and batch.weight == len(after)
        assert torch.equal(batch.prefix_lengths, prefixes) if prefix_mask else batch.prefix_lengths is None


def test_infilling_writes_the_whole_text():
    bart = train_bpe(TEXTS, 300, ("<s>", "</s>", "<pad>", "<mask>"))
    examples, _ = tokenize_plain(ROWS, bart, 200, special_tokens=3)
    found = sides(collate_seq2seq(fixed_seed_rows(examples), 200, corrupt=denoising(bart), start_id=1))
    for example in examples:
        source, target = found[example.row_id]
        assert target == [1, 0, *example.ids]  # this tokenizer puts nothing after a text
        assert 3 in source and len(source) <= len(example.ids) + 1


def test_noises_act_in_the_order_they_are_named():
    tokenizer = train_tokenizer("wordpiece", [". ".join(TEXTS)], 60)
    ids = tokenizer("the cat sat . on the mat . and watched", add_special_tokens=False).input_ids
    corrupt = denoising(tokenizer, noises=["permutation", "deletion"], density=0.5)
    source, target = corrupt(ids, np.random.default_rng(3))
    first = permute_sentences(ids, {tokenizer.convert_tokens_to_ids(".")}, rng := np.random.default_rng(3))
    assert source[1:-1] == delete_tokens(first, rng, density=0.5) and target[1:-1] == ids
    assert corrupt(ids, np.random.default_rng(3)) == (source, target)  # the same for the same seed


def test_special_token_templates_are_read_from_the_tokenizer(wordpiece, unigram, bpe):
    cls, sep = wordpiece.cls_token_id, wordpiece.sep_token_id
    pair = special_token_template(wordpiece).encode([50, 51], [52])
    assert pair.ids == [cls, 50, 51, sep, 52, sep]
    assert pair.segments == [0, 0, 0, 0, 1, 1]
    assert pair.is_text == [False, True, True, False, True, False]
    assert pair.starts == (1, 4)
    end = unigram.eos_token_id
    assert special_token_template(unigram).encode([50], [52]).ids == [50, end, 52, end]
    assert special_token_template(bpe).encode([50]).ids == [bpe.bos_token_id, 50]
    assert set(wordpiece.all_special_ids).isdisjoint(mask_tokens_of(wordpiece).random_ids.tolist())
