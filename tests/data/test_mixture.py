"""Mixtures: shares as the papers have them, draws that match them, and an order that nothing but (seed, position) decides."""

from itertools import chain

import numpy as np
import pytest

from alignment.data.batches import Example
from alignment.data.config import DataConfig, SourceConfig
from alignment.data.stream import Stream, epoch_rows, mixing_shares, stream_of
from alignment.data.table import JoinedTables
from alignment.errors import UserError

WEIGHTS = (3.0, 1.0, 0.5)


def examples(*sizes):
    """Rows of several sources; a row's name says which row of which source it is."""
    return JoinedTables(
        [
            [Example.single([number, row], [False, True], f"{number}:{row}", source=number) for row in range(size)]
            for number, size in enumerate(sizes)
        ]
    )


def data(mixing, *, weights=(None, None, None), **settings):
    sources = [SourceConfig(f"{name}.jsonl", weight=weight) for name, weight in zip("abc", weights, strict=False)]
    return DataConfig(train=sources, mixing=mixing, **settings)


def stream(mixing="weights", weights=WEIGHTS, sizes=(70, 1000, 11), *, batch_size=8, seed=0, epochs=None, **settings):
    return stream_of(
        data(mixing, weights=weights, **settings), examples(*sizes), batch_size=batch_size, seed=seed, epochs=epochs
    )


# Shares


def test_shares_by_hand():
    sizes = [100, 400, 3600]
    # proportional: 100, 400 and 3600 of 4100; at most 900 of a source: 100, 400 and 900 of 1400
    assert mixing_shares(data("proportional"), sizes) == pytest.approx([100 / 4100, 400 / 4100, 3600 / 4100])
    capped = data("proportional", mixing_maximum=900)
    assert mixing_shares(capped, sizes) == pytest.approx([1 / 14, 4 / 14, 9 / 14])
    # temperature 2: square roots, 10, 20 and 60 of 90; with the maximum 10, 20 and 30 of 60
    assert mixing_shares(data("temperature", temperature=2), sizes) == pytest.approx([1 / 9, 2 / 9, 6 / 9])
    both = data("temperature", temperature=2, mixing_maximum=900)
    assert mixing_shares(both, sizes) == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    assert mixing_shares(data("weights", weights=WEIGHTS), sizes) == pytest.approx([6 / 9, 2 / 9, 1 / 9])


def test_an_epoch_is_the_sum_of_the_capped_sizes():
    assert epoch_rows(data("concatenate"), [5, 60, 3]) == 68
    assert epoch_rows(data("proportional"), [5, 60, 3]) == 68
    assert epoch_rows(data("proportional", mixing_maximum=20), [5, 60, 3]) == 28
    capped = stream("proportional", (None,) * 3, (5, 60, 3), mixing_maximum=20, epochs=2, batch_size=10)
    assert len(capped.rows_at(5)) == 6  # of 56


# Draws


def sources_choices(mixture, steps):
    return [row.source for step in steps for row in mixture.rows_at(step)]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("mixing", "settings"),
    [
        ("weights", {"weights": WEIGHTS}),
        ("proportional", {"weights": (None,) * 3, "mixing_maximum": 300}),
        ("temperature", {"weights": (None,) * 3, "temperature": 2.0}),
    ],
)
def test_100_000_draws_match_the_shares(mixing, settings, seed):
    from scipy.stats import chisquare

    mixture = stream(mixing, batch_size=1000, seed=seed, **settings)
    counts = np.bincount(sources_choices(mixture, range(100)), minlength=3)
    assert counts.sum() == 100_000
    assert chisquare(counts, np.array(mixture.shares) * 100_000).pvalue > 1e-3
    assert chisquare(counts, np.full(3, 100_000 / 3)).pvalue < 1e-6  # the test would see wrong shares


def test_a_source_shows_each_row_once_per_epoch_of_its_own():
    mixture = stream(batch_size=50, sizes=(70, 1000, 11))
    drawn = [row.row_id for step in range(40) for row in mixture.rows_at(step)]
    epochs = [epoch for step in range(40) for epoch in mixture.epochs_at(step)]
    for number, size in enumerate((70, 1000, 11)):
        own = [name for name in drawn if name.startswith(f"{number}:")]
        seen = [epoch for name, epoch in zip(drawn, epochs, strict=True) if name.startswith(f"{number}:")]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size
        assert seen == [index // size for index in range(len(own))]
        assert own == [
            f"{number}:{row}" for row, _ in map(mixture._sources[number].row_of, range(len(own)))
        ]  # the k-th draw is row k of the source's own stream


# Determinism


def test_draws_depend_on_seed_and_position_alone():
    first, again, other = stream(seed=3), stream(seed=3), stream(seed=4)
    forwards = [first.positions_at(step) for step in range(1200)]
    assert [again.positions_at(step) for step in reversed(range(1200))] == forwards[::-1]
    assert [other.positions_at(step) for step in range(1200)] != forwards
    larger = stream(seed=3, batch_size=24)
    assert list(chain(*map(larger.positions_at, range(400)))) == list(chain(*forwards))


def test_a_far_position_is_cheap_and_the_same():
    """Position 40 million: 10,000 blocks of counts, of which only one is drawn in full."""
    near = stream(batch_size=1000)
    near.positions_at(0)
    far = stream(batch_size=1000)
    assert near.positions_at(40_000) == far.positions_at(40_000)
    far = far._choices
    assert far._block.cache_info().currsize == 1 and len(far._counts) < 20_000
    counts = np.zeros(3, dtype=int)
    for block in range(5):
        assert [(far._block(block)[:, 0] == source).sum() for source in range(3)] == list(far._counts[block])
        firsts = [far._block(block)[far._block(block)[:, 0] == source, 1].min(initial=10**9) for source in range(3)]
        assert firsts == list(counts)
        counts += far._counts[block]


def test_the_end_is_that_of_a_plain_stream():
    mixture = stream(sizes=(5, 6, 4), batch_size=4, epochs=1.5)  # 22.5 rows, rounded to the even number
    plain = Stream(list(range(15)), 4, 0, epochs=1.5)
    for each in (mixture, plain):
        assert [len(each.rows_at(step)) for step in range(6)] == [4, 4, 4, 4, 4, 2]
    for step in (-1, 6):
        with pytest.raises(IndexError):
            mixture.rows_at(step)


# Refusals


def test_a_source_without_rows_is_refused():
    with pytest.raises(UserError, match=r"b\.jsonl: no row of it can be drawn"):
        stream(sizes=(5, 0, 3))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mixing": "weights"}, "needs a weight for every source of data.train; none for: a, b"),
        ({"weights": (1.0, None)}, "draws by no weights, and these sources have one: a"),
        ({"mixing": "proportional", "weights": (1.0, 2.0)}, "mixing is proportional, which draws by no weights"),
        ({"mixing": "temperature"}, "temperature is missing"),
        ({"temperature": 2.0}, "temperature says nothing with data.mixing=concatenate"),
        ({"mixing": "weights", "weights": (1.0, 2.0), "mixing_maximum": 3}, "mixing_maximum says nothing"),
        ({"mixing": "proportional", "max_rows": 9}, "give each source its own max_rows"),
        ({"evaluation": [SourceConfig("d.jsonl", weight=1.0)]}, "held-out rows are all read"),
        ({"evaluation": ["d.jsonl", SourceConfig("e.jsonl", name="d")]}, "evaluation has two sources of the name d"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, words):
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        data(**{"mixing": "concatenate", "weights": (None, None), **settings})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weight": 0.0}, "weight must be above 0, got 0.0"),
        ({"max_rows": 0}, "max_rows must be at least 1"),
        ({"name": "a b"}, "name may have letters"),
        ({"source": ""}, "names no file"),
    ],
)
def test_wrong_settings_of_a_source_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        SourceConfig(**{"source": "a.jsonl", **settings})


def test_names_tell_sources_apart():
    def names(*train):
        return [source.name for source in DataConfig(train=list(train)).sources("train")]

    assert names("data/a.jsonl", "data/b.jsonl.gz") == ["a", "b"]
    assert names("x/train.jsonl", "y/train.jsonl", "other.csv") == ["train.1", "train.2", "other"]
    assert names("a.jsonl", "a.jsonl") == ["a.1", "a.2"]
    assert names("org/set:main[test]", "org/more") == ["set", "more"]
    assert names("web/*.jsonl", "books/", "**/*.csv") == ["web", "books", "source"]
    assert names("my rows.jsonl", SourceConfig("b.jsonl", name="mine")) == ["my_rows", "mine"]
