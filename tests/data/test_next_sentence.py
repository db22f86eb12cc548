"""Sentence pairs of BERT and ALBERT: half follow, others are of another text or swapped; lengths give no label away."""

from functools import partial

import numpy as np
import pytest
import torch

from alignment.data.pretraining.corruption import Masking, fixed_seed_rows
from alignment.data.pretraining.prepare import (
    FOLLOWS,
    collate_sentence_pairs,
    group_sentences,
    make_pair,
    mask_tokens_of,
    ordered_pair,
    other_sentences,
    passage_of,
    sentences_of,
    tokenize_passages,
)
from alignment.data.rows.records import Text
from alignment.data.table import mask_of
from alignment.data.text.special_tokens import SpecialTokenTemplate, special_token_template
from alignment.data.tokenizers.train import train_tokenizer
from alignment.errors import UserError

# each text has words of its own, so that a sentence tells where it is from
NAMES = [f"{a}{b}" for a in "bcdfg" for b in "aeiou"]
ROWS = [
    Text(" ".join(f"{name} sees {name} {'again ' * (n % 4)}now." for n in range(9)), name)
    for number, name in enumerate(NAMES)
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer("wordpiece", [row.text for row in ROWS], 200)


def make(tokenizer, max_length, seed=0):
    passages, counts = tokenize_passages(ROWS, tokenizer, max_length)
    template = special_token_template(tokenizer)
    pairs = [
        make_pair(row.row, row.generator(), passages=passages, template=template, max_length=max_length)
        for row in fixed_seed_rows(passages, seed)
    ]
    return passages, counts, pairs


def test_sentences_end_at_stops_and_lines():
    assert sentences_of("One. Two!  Three?\n\nfour 3.5 five\n") == ["One.", "Two!", "Three?", "four 3.5 five"]


@pytest.mark.parametrize(
    ("lengths", "budget", "expected"),
    [
        ([3, 3, 3, 3], 6, [2, 2]),
        ([3, 3, 3], 6, [3]),  # no sentence is alone
        ([2, 2, 2, 5], 6, [2, 2]),  # the last takes one from a group of three
        ([9, 9, 1, 1], 6, [2, 2]),  # two sentences at least, however long
        ([1, 1], 9, [2]),
    ],
)
def test_sentences_come_in_groups_of_two_or_more(lengths, budget, expected):
    groups = group_sentences(lengths, budget)
    assert [part.stop - part.start for part in groups] == expected
    assert [n for part in groups for n in range(part.start, part.stop)] == list(range(len(lengths)))


def test_pairs_follow_or_come_from_another_text_half_of_the_time(tokenizer):
    labels = []
    for seed in range(20):
        _, _, pairs = make(tokenizer, 48, seed)
        for pair in pairs:
            segments, label = pair.values["segments"], pair.values["label"]
            tokens = tokenizer.convert_ids_to_tokens(pair.ids)
            edge = segments.index(1)
            assert (tokens[0], tokens[edge - 1], tokens[-1]) == ("[CLS]", "[SEP]", "[SEP]")
            assert segments == [0] * edge + [1] * (len(tokens) - edge)
            assert pair.mask == [token not in ("[CLS]", "[SEP]") for token in tokens]
            first, second = (
                {word for word in tokenizer.decode(part).split() if word in NAMES}
                for part in (pair.ids[:edge], pair.ids[edge:])
            )
            assert len(first) == len(second) == 1
            assert (first == second) == (label == FOLLOWS)
            labels.append(label)
    share = sum(labels) / len(labels)
    assert abs(share - 0.5) < 4 * 0.5 / len(labels) ** 0.5


def test_pairs_keep_to_the_length_and_what_is_cut_is_counted(tokenizer):
    passages, counts, pairs = make(tokenizer, 14)
    budget = 14 - 3
    assert all(len(pair.ids) <= 14 for pair in pairs)
    long = sum(len(passage.ids) > budget for passage in passages)
    assert sum(counts.cut.values()) == long > 0


def test_batches_carry_masks_segments_and_labels_however_they_are_cut(tokenizer):
    passages, _, pairs = make(tokenizer, 48)
    template, mask_tokens = special_token_template(tokenizer), mask_tokens_of(tokenizer)
    make_one = partial(make_pair, passages=passages, template=template, max_length=48)
    options = {"make": make_one, "mask_tokens": mask_tokens}
    rows = fixed_seed_rows(passages)
    whole, parts = (collate_sentence_pairs(rows, size, masking=Masking(), **options) for size in (100_000, 120))
    [batch] = whole
    assert batch.weight == len(pairs) == sum(part.weight for part in parts)
    assert sorted(batch.labels.tolist()) == sorted(pair.values["label"] for pair in pairs)
    assert batch.ragged.segments is not None and len(batch.ragged.segments) == len(batch.ragged.tokens)
    assert batch.ragged.weight == sum(part.ragged.weight for part in parts)
    assert sorted(batch.ragged.labels.tolist()) == sorted(t for part in parts for t in part.ragged.labels.tolist())
    # the shares of a pair's masked tokens add up to one
    assert torch.allclose(
        torch.zeros(len(pairs)).index_add(0, batch.ragged.target_rows, batch.token_shares), torch.ones(len(pairs))
    )
    assert batch.to("cpu").labels.tolist() == batch.labels.tolist()


def test_texts_of_one_sentence_are_counted_and_one_text_alone_is_refused(tokenizer):
    _, counts = tokenize_passages([*ROWS, Text("only one.", "x")], tokenizer, 48)
    assert counts.lost == 1
    with pytest.raises(UserError, match="at least two texts"):
        tokenize_passages(ROWS[:1], tokenizer, 48)


def test_words_of_a_pair_begin_where_its_own_tokens_do():
    text = "The unbelievable cat sat. A dog unbelievably watched it. Nobody knew unbelievable things."
    tokenizer = train_tokenizer("wordpiece", [text] * 5, 70)
    passages, _ = tokenize_passages([Text(text, "a"), Text(text, "b")], tokenizer, 200)
    for seed in range(6):
        generator = np.random.default_rng(seed)
        template = special_token_template(tokenizer)
        example = make_pair(passages[0], generator, passages=passages, template=template, max_length=60)
        tokens = tokenizer.convert_ids_to_tokens(example.ids)
        inner = [token.startswith("##") for token in tokens]
        assert any(inner)
        starts = mask_of(example.values["word_starts"])
        assert starts == [own and not within for own, within in zip(example.mask, inner, strict=True)]


def test_a_replacement_is_as_long_as_whole_sentences_allow():
    def passage(document):
        return passage_of([[(10 * document + n, True)] * 3 for n in range(4)], document, str(document))

    passages = [passage(1), passage(2)]
    firsts = set()
    for seed in range(40):
        chosen = other_sentences(passages[0], passages, 5, np.random.default_rng(seed))
        first, second = (sentence[0][0] for sentence in chosen)  # two sentences: 6 is nearer than 3
        assert second == first + 1
        firsts.add(first)
    assert firsts == {20, 21, 22}


def test_sentences_of_one_text_change_places_half_of_the_time():
    """Sentences 0 to 3 of two tokens each: the pair is the text cut at a sentence, or its parts the other way round."""
    passage = passage_of([[(10 + n, True), (20 + n, False)] for n in range(4)], 0, "a")
    template = SpecialTokenTemplate(([1], [2]), ([1], [2], [2]), (0, 0, 0, 1, 1))
    seen, text = [], [10, 20, 11, 21, 12, 22, 13, 23]
    for seed in range(300):
        pair = ordered_pair(passage, np.random.default_rng(seed), template=template, max_length=64)
        edge = pair.values["segments"].index(1)
        first, second = pair.ids[1 : edge - 1], pair.ids[edge:-1]
        assert (second + first if pair.values["label"] else first + second) == text
        assert len(first) % 2 == 0 and mask_of(pair.values["word_starts"])[1] and not pair.mask[0]
        seen.append((pair.values["label"], edge))
    assert {(label, edge) for label in (0, 1) for edge in (4, 6, 8)} == set(seen)
    swapped = sum(label for label, _ in seen)
    assert abs(swapped - 150) < 4 * (300 * 0.25) ** 0.5
