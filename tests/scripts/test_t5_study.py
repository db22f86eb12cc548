"""The comparison of architectures and objectives: what they share and see, and that every run goes from text to accuracy."""

import sys
from pathlib import Path

import pytest
from torch.testing import assert_close

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
import t5_study  # noqa: E402

from alignment.data.pretraining.corruption import fixed_seed_rows  # noqa: E402


@pytest.fixture(scope="module")
def study():
    return t5_study.Study(2, 2)


def test_a_shared_stack_has_the_weights_of_one_and_cross_attention(study):
    counts = {name: study.parameters(name) for name in t5_study.ARCHITECTURES}
    assert counts["encoder-decoder"] > counts["shared"] > counts["prefix LM"] == counts["language model"]
    model = study.build("shared")
    assert model.decoder.blocks[1].attention.query.weight is model.encoder.blocks[1].attention.query.weight
    assert model.decoder.blocks[0].cross is not None


def test_only_a_prefix_lm_reads_its_source_both_ways(study):
    for name in ("language model", "prefix LM"):
        model = study.build(name)
        batches = []
        for last in (30, 31):  # another last token of the source
            example = study.train[0]
            ids = [*example.ids[:-2], last, example.ids[-1]]
            collate = t5_study.collate_for(name, lambda ids, _: ([*ids[:-1], 1], [ids[-1], 1]))
            batches += collate(fixed_seed_rows([type(example).single(ids, [True] * len(ids), "0")]), 1000)
        states = [model.hidden_states(model.trunk, batch)[0] for batch in batches]
        if name == "prefix LM":
            assert (states[0] - states[1]).abs().max() > 1e-3
        else:
            assert_close(states[0], states[1])


@pytest.mark.parametrize("name", t5_study.ARCHITECTURES)
def test_every_architecture_learns_each_objective(study, name):
    for objective in ("denoising", "LM"):
        row = study.run(name, objective, 0)
        assert 0 <= row["accuracy"] <= 1 and row["pretraining_loss"] > 0


def test_labeled_words_and_judged_words_are_apart(study):
    words = {word for words in t5_study.WORDS for word in words}
    seen = [
        {study.ids[w] for w in words} & {token for e in part for token in e.ids} for part in (study.train, study.judged)
    ]
    assert not seen[0] & seen[1] and len(seen[0]) == len(seen[1]) == 12
