"""Batches in which a prompt stands once for all of its responses: where every token lies, and what is a target."""

import random

import pytest
import torch

from alignment.data.batches import Example, collate_pairs, collate_rankings
from alignment.ragged import Ragged, common_prompt, with_virtual_tokens
from tests.examples import pair_example, ranked_example


def responses(prompt, *answers, row_id="row"):
    """Prompt with each answer; all tokens of the answers count."""
    return [
        Example.single([*prompt, *answer], [False] * len(prompt) + [True] * len(answer), f"{row_id}.{number}")
        for number, answer in enumerate(answers)
    ]


def build(examples, groups, **keys):
    return Ragged.build_shared([e.ids for e in examples], [e.mask for e in examples], groups, **keys)


def whole_documents(batch):
    return [batch.tokens[index].tolist() for index in batch.shared.documents.split(list(batch.lengths))]


@pytest.mark.parametrize(
    ("documents", "masks", "expected"),
    [
        ([[1, 2, 3], [1, 2, 4]], [[0, 0, 1], [0, 0, 1]], 2),
        ([[1, 2, 3], [1, 9, 3]], [[0, 0, 1], [0, 0, 1]], 1),
        ([[1, 2, 3], [5, 2, 3]], [[0, 0, 1], [0, 0, 1]], 0),
        ([[1, 2, 3, 4], [1, 2, 3, 5]], [[0, 0, 1, 1], [0, 0, 0, 1]], 2),  # what one document counts is not shared
        ([[1, 2, 3], [1, 2, 3]], [[0, 0, 0], [0, 0, 0]], 2),  # each keeps a token
        ([[1, 2], [1, 2, 3]], [[0, 0], [0, 0, 1]], 1),
        ([[1, 2, 3], [1, 2, 3]], [[1, 0, 1], [1, 0, 1]], 2),  # a document's first token is never a target
        ([[1], [1, 2]], [[0], [0, 1]], 0),
    ],
)
def test_the_prompt_is_what_all_begin_with_and_none_counts(documents, masks, expected):
    assert common_prompt(documents, [[bool(x) for x in mask] for mask in masks]) == expected


def test_a_pair_by_hand():
    batch = build(responses([1, 2, 3], [4, 5], [6]) + responses([7], [8], [9, 8]), [(0, 1), (2, 3)])
    #                index     0  1  2  3 | 4  5 | 6 | 7 | 8  9
    assert batch.tokens.tolist() == [1, 2, 3, 7, 4, 5, 6, 8, 9, 8]
    assert batch.positions.tolist() == [0, 1, 2, 0, 3, 4, 3, 1, 1, 2]
    assert batch.lengths == (5, 4, 2, 3) and batch.pieces == (3, 1, 2, 1, 1, 2)
    assert batch.starts.tolist() == [4, 6, 7, 8, 10] and batch.starts.dtype == torch.int32
    assert batch.firsts.tolist() == [0, 0, 3, 3] and batch.last.tolist() == [5, 6, 7, 9]
    assert batch.target_index.tolist() == [4, 5, 6, 7, 8, 9]
    assert batch.before.tolist() == [2, 4, 2, 3, 3, 8]
    assert batch.target_rows.tolist() == [0, 0, 1, 2, 3, 3]
    assert batch.shared.repeated.tolist() == [0, 2, 3, 4]  # the first tokens of all responses
    assert batch.weight == 6.0 and batch.sizes.tolist() == [5, 4, 2, 3]


def test_every_document_can_be_read_off_whole():
    chance = random.Random(1)
    examples, groups = [], []
    for _ in range(12):
        prompt = [chance.randrange(50) for _ in range(chance.randint(0, 9))]
        answers = [[chance.randrange(50) for _ in range(chance.randint(1, 6))] for _ in range(chance.randint(1, 4))]
        groups.append(list(range(len(examples), len(examples) + len(answers))))
        examples += responses(prompt, *answers)
    shared, plain = build(examples, groups), Ragged.build([e.ids for e in examples], [e.mask for e in examples])
    assert len(shared.tokens) < len(plain.tokens) and shared.lengths == plain.lengths
    index = shared.shared.documents
    for name in ("tokens", "positions"):
        assert torch.equal(getattr(shared, name)[index], getattr(plain, name))
    for name in ("target_index", "last", "firsts"):
        assert torch.equal(getattr(shared, name), index[getattr(plain, name)])
    assert torch.equal(shared.before, index[plain.target_index - 1])
    assert torch.equal(shared.target_rows, plain.target_rows) and torch.equal(shared.sizes, plain.sizes)


def test_virtual_tokens_stand_once_before_a_shared_prompt():
    batch = build(responses([1, 2], [3], [4, 5]) + responses([], [6, 7]), [(0, 1)])
    longer, own, virtual = with_virtual_tokens(batch, 3)
    assert longer.tokens.tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 0, 0, 0, 6, 7]
    assert longer.positions.tolist() == [0, 1, 2, 3, 4, 5, 5, 6, 0, 1, 2, 3, 4]
    assert torch.equal(longer.tokens[own], batch.tokens) and virtual.tolist() == [0, 1, 2, 8, 9, 10]
    assert whole_documents(longer) == [[0, 0, 0, 1, 2, 3], [0, 0, 0, 1, 2, 4, 5], [0, 0, 0, 6, 7]]
    assert longer.lengths == (6, 7, 5) and longer.shared.lengths == (5,)
    assert longer.firsts.tolist() == [0, 0, 8] and longer.last.tolist() == [5, 7, 12]
    assert longer.before.tolist() == [4, 4, 6, 11] and longer.target_index.tolist() == [5, 6, 7, 12]


def test_groups_without_a_common_prompt_are_an_ordinary_batch():
    examples = responses([1], [2, 3], [4]) + responses([9], [2])
    batch = build([examples[0], examples[2]], [(0, 1)])
    assert batch.shared is None and batch.tokens.tolist() == [1, 2, 3, 9, 2]
    assert build(examples, [(0, 1), (2,)], share=False).shared is None


def test_which_groups_share_may_depend_on_their_lengths():
    examples = responses([1, 2], [3], [4]) + responses([5, 6], [3] * 5, [4])
    batch = build(examples, [(0, 1), (2, 3)], share=lambda lengths: max(lengths) < 5)
    assert batch.shared.of_documents == (0, 0, None, None)
    assert whole_documents(batch) == [e.ids for e in examples]


def pair(prompt, chosen, rejected, name="pair"):
    return pair_example(*responses(prompt, chosen, rejected), None, name)


def test_pairs_lie_chosen_first_and_count_a_shared_prompt_once():
    pairs = [pair([1] * 6, [2, 3], [4, 5]), pair([7] * 6, [8, 9], [6, 5])]
    assert [len(batch.lengths) for batch in collate_pairs(pairs, 20)] == [2, 2]
    [batch] = collate_pairs(pairs, 20, share_prompts=True)
    assert len(batch.ragged.tokens) == 20 and batch.weight == 2.0
    assert whole_documents(batch.ragged) == [each.documents[side] for side in (0, 1) for each in pairs]


def test_rankings_keep_the_responses_of_a_prompt_together():
    rows = [
        ranked_example(tuple(responses([1, 2], [3], [4], [5, 6])), (1, 0, 1), "a"),
        ranked_example(tuple(responses([9], [3], [4])), (0, 1), "b", margin=0.5),
    ]
    plain, shared = (collate_rankings(rows, 100, share_prompts=share) for share in (False, True))
    for [batch] in (plain, shared):
        assert batch.ranks.tolist() == [1, 0, 1, 0, 1] and batch.groups.tolist() == [0, 0, 0, 1, 1]
        assert batch.sizes == (3, 2) and batch.weight == 2.0 and batch.margins.tolist() == [0.0, 0.5]
        assert batch.lengths == (3, 3, 4, 2, 2)
    assert len(plain[0].ragged.tokens) == 14 and len(shared[0].ragged.tokens) == 9
    assert [len(b.lengths) for b in collate_rankings(rows, 3)] == [3, 2]


def test_documents_with_a_shared_prompt_take_equally_many_virtual_tokens():
    batch = build(responses([1, 2], [3], [4, 5]), [(0, 1)])
    with pytest.raises(ValueError, match="equally many virtual tokens"):
        with_virtual_tokens(batch, [2, 3])


def test_each_document_takes_virtual_tokens_of_its_own_number():
    longer, own, virtual = with_virtual_tokens(Ragged.build([[7, 8], [5], [6]]), [2, 0, 1])
    assert longer.tokens.tolist() == [0, 0, 7, 8, 5, 0, 6] and longer.lengths == (4, 1, 2)
    assert longer.positions.tolist() == [0, 1, 2, 3, 0, 0, 1]
    assert (own.tolist(), virtual.tolist()) == ([2, 3, 4, 6], [0, 1, 5])
