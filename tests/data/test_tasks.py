"""Labeled rows to batches: texts, pairs, words, answers, choices, GPT-1's inputs; lost labels are counted."""

import gzip
import json

import pytest

from alignment.data.config import DataConfig
from alignment.data.pretraining.prepare import prepare_text
from alignment.data.tasks.classification import (
    NO_TEXT,
    PAIR_CUT,
    TEXT_END_CUT,
    WORDS_CUT,
    WORDS_LOST,
    collate_classes,
    collate_token_labels,
    encode_texts,
    encode_words,
)
from alignment.data.tasks.gpt1_inputs import (
    GPT1Tokens,
    add_gpt1_tokens,
    collate_multi_sequence,
    encode_gpt1_choices,
    encode_gpt1_similarity,
    encode_gpt1_texts,
)
from alignment.data.tasks.multiple_choice import collate_choices, encode_choices
from alignment.data.tasks.prepare import prepare_labeled
from alignment.data.tasks.question_answering import (
    ANSWER_NOWHERE,
    NO_ANSWER_HERE,
    QUESTION_CUT,
    collate_spans,
    encode_questions,
    window_starts,
)
from alignment.data.tasks.rows import (
    Choice,
    LabeledText,
    LabeledWords,
    Question,
    label_names,
    read_labeled,
    require_labels,
)
from alignment.data.tokenizers.load import read_tokenizer_files
from alignment.data.tokenizers.train import train_bpe, train_tokenizer
from alignment.errors import UserError
from alignment.losses.classification import IGNORED

TEXT = "the quick brown fox jumps over the lazy dog while unbelievable cats watch from afar"
KINDS = {"wordpiece": 120, "bpe": 330, "unigram": 60, "characters": None, "bytes": None}


@pytest.fixture(scope="module")
def tokenizers():
    return {kind: train_tokenizer(kind, [TEXT] * 5, size) for kind, size in KINDS.items()}


@pytest.fixture(scope="module")
def wordpiece(tokenizers):
    return tokenizers["wordpiece"]


def text_of(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True).strip()


NAMES = {0: "no", 1: "yes"}


def test_a_text_and_a_pair_are_encoded_and_truncated_at_the_longer_text(wordpiece):
    rows = [
        LabeledText("the quick fox", None, "yes", "a"),
        LabeledText("the lazy dog jumps over the quick brown fox", None, "no", "b"),
        LabeledText("the lazy dog jumps over the quick brown fox", "cats watch", "no", "c"),
    ]
    whole, _ = encode_texts(rows, wordpiece, 200, NAMES)
    cut, counts = encode_texts(rows, wordpiece, len(whole[0].encoded.ids), NAMES)
    assert [example.label for example in whole] == [1, 0, 0]
    assert cut[0] == whole[0]
    assert cut[1].encoded.ids[:-1] == whole[1].encoded.ids[: len(whole[0].encoded.ids) - 1]
    assert counts.cut == {TEXT_END_CUT: 1, PAIR_CUT: 1}
    assert counts.tokens == sum(len(example.encoded.ids) for example in cut)
    [batch] = collate_classes(whole, 1000)
    assert batch.weight == batch.ragged.weight == 3
    assert dict(zip(batch.ragged.row_ids, batch.labels.tolist(), strict=True)) == {"a": 1, "b": 0, "c": 0}
    assert (
        batch.ragged.segments.sum() == sum(whole[2].encoded.segments) == len(wordpiece("cats watch")["input_ids"]) - 1
    )
    [single] = collate_classes(whole[:2], 1000)
    assert single.ragged.segments is None
    assert sum(part.weight for part in collate_classes(whole, 20)) == 3


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram", "characters", "bytes"])
def test_a_words_label_stands_at_its_first_token_whatever_the_tokenizer(tokenizers, kind):
    tokenizer, words = tokenizers[kind], ["unbelievable", "cats", "watch", "the", "dog"]
    row = LabeledWords(words, ["a", "b", "a", "b", "c"], "r")
    [example], counts = encode_words([row], tokenizer, 200, {0: "a", 1: "b", 2: "c"})
    positions = [position for position, label in enumerate(example.labels) if label != IGNORED]
    assert [example.labels[position] for position in positions] == [0, 1, 0, 1, 2] and not counts.cut
    ends = [*positions[1:], len(example.encoded.ids)]
    assert [text_of(tokenizer, example.encoded.ids[a:b]) for a, b in zip(positions, ends, strict=True)] == words
    assert all(example.encoded.is_text[position] for position in positions)
    [batch] = collate_token_labels([example], 1000)
    assert batch.weight == 5 and batch.labels.tolist() == example.labels
    assert len(batch.labels) == len(batch.ragged.tokens)


def test_labels_that_are_lost_are_counted(wordpiece):
    row = LabeledWords(["the", "\u200b", "dog", "cats"], ["a", "b", "a", "b"], "r")
    [example], counts = encode_words([row], wordpiece, 4, {0: "a", 1: "b"})
    kept = sum(label != IGNORED for label in example.labels)
    assert kept + counts.cut[WORDS_LOST] + counts.cut[WORDS_CUT] == 4
    assert counts.cut[WORDS_LOST] == 1


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram", "characters", "bytes"])
def test_an_answer_is_found_again_from_its_tokens(tokenizers, kind):
    tokenizer, context = tokenizers[kind], TEXT
    for answer in ("the", "quick brown", "unbelievable cats", "afar", "lazy"):
        row = Question("over the dog", context, [(answer, context.index(answer))], "q")
        [window], _ = encode_questions([row], tokenizer, 300, stride=50)
        assert text_of(tokenizer, window.encoded.ids[window.start : window.end + 1]) == answer
        first, last = window.offsets[window.start], window.offsets[window.end]
        assert context[first[0] : last[1]].strip() == answer


def test_windows_overlap_reach_the_end_and_count_where_the_answer_is_not(wordpiece):
    context = " ".join([TEXT] * 4)
    start = context.index("afar")
    row = Question("the dog", context, [("afar", start)], "q")
    windows, counts = encode_questions([row], wordpiece, 48, stride=20)
    assert all(len(window.encoded.ids) <= 48 for window in windows)
    seen = {offset for window in windows for offset in window.offsets if offset is not None}
    [whole], _ = encode_questions([row], wordpiece, 1000, stride=100)
    assert seen == {offset for offset in whole.offsets if offset is not None}
    with_answer = [window for window in windows if window.start]
    assert 0 < len(with_answer) < len(windows)
    assert counts.cut == {NO_ANSWER_HERE: len(windows) - len(with_answer)}
    for window in with_answer:
        assert window.offsets[window.start][0] == start and window.offsets[window.end][1] == start + 4
    batches = collate_spans(windows, 100)
    assert sum(batch.weight for batch in batches) == len(windows)
    for batch in batches:
        for row, start in enumerate(batch.answer_starts.tolist()):
            first = int(batch.ragged.starts[row])
            ids = batch.ragged.tokens[start : int(batch.answer_ends[row]) + 1]
            assert start == first or text_of(wordpiece, ids) == "afar"


@pytest.mark.parametrize(
    ("length", "room", "stride", "expected"),
    [(0, 5, 3, [0]), (5, 5, 3, [0]), (6, 5, 3, [0, 3]), (8, 5, 3, [0, 3]), (9, 5, 3, [0, 3, 6]), (10, 5, 5, [0, 5])],
)
def test_window_starts(length, room, stride, expected):
    assert window_starts(length, room, stride) == expected


def test_an_answer_longer_than_any_window_and_no_answer_at_all(wordpiece):
    context = " ".join([TEXT] * 4)
    rows = [Question("the dog", context, [(context, 0)], "long"), Question("the dog", context, [], "none")]
    windows, counts = encode_questions(rows, wordpiece, 30, stride=10)
    assert all(window.start == window.end == 0 for window in windows)
    assert counts.cut == {NO_ANSWER_HERE: len(windows), ANSWER_NOWHERE: 1}
    assert counts.first[ANSWER_NOWHERE] == ["long"]


def test_a_stride_that_skips_text_is_refused(wordpiece):
    with pytest.raises(UserError, match="stride must be from 1 to"):
        encode_questions([Question("the dog", TEXT, [], "q")], wordpiece, 30, stride=30)


def test_gpt1_inputs(tokenizers):
    plain = tokenizers["bpe"]
    tokenizer = add_gpt1_tokens(plain)
    assert len(tokenizer) == len(plain) + 3 and "<start>" not in plain.get_vocab()
    assert len(add_gpt1_tokens(tokenizer)) == len(tokenizer)
    start, delimiter, extract = (tokenizer.convert_tokens_to_ids(m) for m in ("<start>", "<delimiter>", "<extract>"))
    assert GPT1Tokens.of(tokenizer) == GPT1Tokens(start, delimiter, extract)
    ids = {text: plain(text, add_special_tokens=False)["input_ids"] for text in ("the fox", "lazy dog", "cats")}
    one, pair = LabeledText("the fox", None, "no", "a"), LabeledText("the fox", "lazy dog", "yes", "b")
    a, b, c = ids["the fox"], ids["lazy dog"], ids["cats"]

    classes, _ = encode_gpt1_texts([one, pair], tokenizer, 64, NAMES)
    assert [example.documents for example in classes] == [
        [[start, *a, extract]],
        [[start, *a, delimiter, *b, extract]],
    ]
    [similar], _ = encode_gpt1_similarity([pair], tokenizer, 64, NAMES)
    assert similar.documents == [[start, *a, delimiter, *b, extract], [start, *b, delimiter, *a, extract]]
    [choice], _ = encode_gpt1_choices([Choice("the fox", ["cats", "lazy dog"], 1, "c")], tokenizer, 64)
    assert choice.documents == [[start, *a, delimiter, *c, extract], [start, *a, delimiter, *b, extract]]
    assert (choice.label, similar.label, classes[0].label) == (1, 1, 0)

    [batch] = collate_multi_sequence([classes[0], similar, choice], 1000)
    assert batch.weight == 3
    assert (batch.ragged.tokens[batch.ragged.last] == extract).all()
    assert len(batch.ragged.lengths) == 5 and [batch.rows.tolist().count(row) for row in range(3)] == [
        {"a": 1, "b": 2, "c": 2}[name] for name in dict.fromkeys(batch.ragged.row_ids)
    ]
    labels = dict(zip(dict.fromkeys(batch.ragged.row_ids), batch.labels.tolist(), strict=True))
    assert labels == {"a": 0, "b": 1, "c": 1}
    assert len(batch.ragged.target_index) == len(batch.ragged.tokens) - 5  # every token but each first one
    cut, counts = encode_gpt1_texts([pair], tokenizer, 3 + len(a) + len(b) - 1, NAMES)
    assert sum(counts.cut.values()) == 1 and len(cut[0].documents[0]) == 3 + len(a) + len(b) - 1


def test_label_names_are_sorted_as_numbers_where_they_are_numbers():
    rows = [LabeledText("x", None, label, label) for label in ("10", "2", "2", "0")]
    assert label_names(rows) == {0: "0", 1: "2", 2: "10"}
    words = [LabeledWords(["a", "b"], ["O", "B-PER"], "w"), LabeledWords(["c"], ["I-PER"], "v")]
    assert label_names(words) == {0: "B-PER", 1: "I-PER", 2: "O"}
    with pytest.raises(UserError, match="same label"):
        label_names(rows[1:3])
    with pytest.raises(UserError, match="10: label '10' is unknown; known: 0, 2"):
        require_labels(rows, {0: "0", 1: "2"})


def test_rows_are_read_under_other_names(jsonl):
    path = jsonl({"sentence1": "a", "sentence2": "b", "gold": 1}, {"sentence1": "c", "sentence2": "d", "gold": "0"})
    rows, counts = read_labeled(
        path, "pair_classification", columns={"text": "sentence1", "pair": "sentence2", "label": "gold"}
    )
    assert [(row.text, row.pair, row.label) for row in rows] == [("a", "b", "1"), ("c", "d", "0")]
    assert counts.kept == counts.rows == 2
    assert rows[1].row_id == f"{path}:2"
    path = jsonl(
        {"question": "q", "context": "a cat", "answers": {"text": ["cat"], "answer_start": [2]}}, name="q.jsonl"
    )
    assert read_labeled(path, "question_answering")[0][0].answers == [("cat", 2)]
    path = jsonl({"context": "c", "choices": ["x", "y"], "label": "1"}, name="c.jsonl")
    assert read_labeled(path, "multiple_choice")[0] == [Choice("c", ["x", "y"], 1, f"{path}:1")]
    path = jsonl({"words": ["a", "b"], "labels": [0, 2]}, name="w.jsonl")
    assert read_labeled(path, "token_classification")[0] == [LabeledWords(["a", "b"], ["0", "2"], f"{path}:1")]


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("classification", {"text": "a"}, "label: must be a label"),
        ("classification", {"text": "a", "label": -1}, "label: must be a label"),
        ("classification", {"text": " ", "label": 1}, "text: is only white space"),
        ("pair_classification", {"text": "a", "label": 1}, "pair: missing"),
        ("token_classification", {"words": ["a"], "labels": ["x", "y"]}, "must be as many as words"),
        (
            "question_answering",
            {"question": "q", "context": "a cat", "answers": [{"text": "cat", "answer_start": 3}]},
            "not where",
        ),
        ("question_answering", {"question": "q", "context": "a cat"}, "answers: must be a list"),
        ("multiple_choice", {"context": "c", "choices": ["a"], "label": 1}, "number of a choice"),
    ],
)
def test_bad_rows_are_reported_with_their_line_or_counted(jsonl, task, row, message):
    good = {
        "classification": {"text": "a", "label": 1},
        "pair_classification": {"text": "a", "pair": "b", "label": 1},
        "token_classification": {"words": ["a"], "labels": ["x"]},
        "question_answering": {"question": "q", "context": "a cat", "answers": []},
        "multiple_choice": {"context": "c", "choices": ["a"], "label": 0},
    }[task]
    path = jsonl(good, row, b"{")
    with pytest.raises(UserError, match=f"(?s)2 bad rows.*:2:.*{message}.*:3:.*not JSON"):
        read_labeled(path, task)
    rows, counts = read_labeled(path, task, on_bad_row="skip")
    assert (len(rows), counts.lost, counts.kept, counts.rows) == (1, 2, 1, 3)
    with pytest.raises(UserError, match="unknown task"):
        read_labeled(path, "poetry")


def test_one_call_from_config_to_examples_and_names(jsonl, wordpiece):
    train = jsonl({"text": "the fox", "label": "yes"}, {"text": "the dog", "label": "no"})
    held_out = jsonl({"text": "cats", "label": "maybe"}, name="held.jsonl")
    config = DataConfig(train=train, evaluation=held_out, max_length=32)
    prepared = prepare_labeled(config, "classification", wordpiece, encode_texts)
    examples, counts, names = prepared.examples, prepared.counts, prepared.names
    assert names == {0: "no", 1: "yes"} and [example.label for example in examples] == [1, 0]
    assert counts.documents == 2
    with pytest.raises(UserError, match="'maybe' is unknown; known: no, yes"):
        prepare_labeled(config, "classification", wordpiece, encode_texts, "evaluation", names=names)
    tokenizer = add_gpt1_tokens(wordpiece)
    sequences = prepare_labeled(config, "classification", tokenizer, encode_gpt1_texts).examples
    assert sequences[0].documents[0][-1] == GPT1Tokens.of(tokenizer).extract


@pytest.mark.parametrize("objective", ["causal", "masked", "sentence_pairs", "span_corruption", "prefix", "infilling"])
def test_running_text_is_prepared_for_every_objective_and_unknown_characters_counted(jsonl, objective):
    path = jsonl({"text": "the dog. the fox."}, {"text": "the z dog. the cats."})
    tokenizer = train_tokenizer("characters", ["the dog. the fox. the cats."])
    examples, counts = prepare_text(DataConfig(train=path, max_length=64), objective, tokenizer)
    assert counts.kept == counts.rows == 2 and examples
    assert list(counts.cut.values()) == [1]
    assert next(iter(counts.first.values())) == [f"{path}:2"]
    with pytest.raises(UserError, match="unknown pretraining objective"):
        prepare_text(DataConfig(train=path), "dreaming", tokenizer)


@pytest.mark.real_data
def test_every_xquad_answer_is_found_again(real_data):
    tokenizer = read_tokenizer_files(real_data / "tokenizers" / "bert_uncased")
    rows, counts = read_labeled(str(real_data / "xquad_en" / "xquad_en.jsonl.gz"), "question_answering")
    assert counts.kept == counts.rows == 948
    windows, _ = encode_questions(rows, tokenizer, 384, stride=128)
    found, whole = set(), 0
    for window in windows:
        if window.start:
            text, start = rows[window.question].answers[0]
            first, last = window.offsets[window.start][0], window.offsets[window.end][1]
            assert first <= start and last >= start + len(text)
            whole += (first, last) == (start, start + len(text))
            found.add(window.question)
    assert len(found) == len(rows)
    assert whole >= 0.98 * sum(bool(window.start) for window in windows)  # the others begin or end within a word


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("path", "task", "columns"),
    [
        ("sst2/dev", "classification", {"text": "sentence"}),
        ("cola/train", "classification", {"text": "sentence"}),
        ("mrpc/test", "pair_classification", {"text": "sentence1", "pair": "sentence2"}),
        ("rte/dev", "pair_classification", {"text": "sentence1", "pair": "sentence2"}),
    ],
)
def test_glue_rows_are_read_and_encoded_as_transformers_does(real_data, path, task, columns):
    file = real_data / f"{path}.jsonl.gz"
    tokenizer = read_tokenizer_files(real_data / "tokenizers" / "bert_uncased")
    config = DataConfig(train=str(file), columns=columns, max_length=512)
    prepared = prepare_labeled(config, task, tokenizer, encode_texts)
    examples, counts, names = prepared.examples, prepared.counts, prepared.names
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        raw = [json.loads(line) for line in lines]
    assert counts.kept == len(raw) and not counts.cut and names == {0: "0", 1: "1"}
    for row, example in list(zip(raw, examples, strict=True))[:200]:
        encoded = tokenizer(*[row[column] for column in columns.values()])
        assert example.encoded.ids == encoded["input_ids"]
        assert example.encoded.segments == encoded["token_type_ids"]
        assert example.label == int(row["label"])


def test_an_answer_is_labeled_in_the_windows_that_hold_it_whole(wordpiece):
    answer = "lazy dog while"
    row = Question("the dog", TEXT, [(answer, TEXT.index(answer))], "q")
    [whole], _ = encode_questions([row], wordpiece, 200, stride=100)
    first, last = whole.offsets[whole.start], whole.offsets[whole.end]
    assert whole.end - whole.start >= 2
    windows, counts = encode_questions([row], wordpiece, 12, stride=1)
    holding = [window for window in windows if {first, last} <= set(window.offsets)]
    assert [window for window in windows if window.start or window.end] == holding
    for window in holding:
        assert (window.offsets[window.start], window.offsets[window.end]) == (first, last)
    cut = [window for window in windows if len({first, last} & set(window.offsets)) == 1]
    assert len(holding) > 2 and len(cut) > 2  # the answer's beginning or end alone stands in some
    assert counts.cut == {NO_ANSWER_HERE: len(windows) - len(holding)}


def test_an_answer_counted_from_the_end_is_refused(jsonl):
    path = jsonl({"question": "q", "context": "a cat sat", "answers": [{"text": "cat", "answer_start": -7}]})
    with pytest.raises(UserError, match="answer_start is not where"):
        read_labeled(path, "question_answering")


def test_so_many_good_rows_are_read_and_bad_ones_do_not_count(jsonl):
    good = {"text": "a", "label": 1}
    path, more = jsonl({"text": "", "label": 1}, good, good, good), jsonl(good, name="more.jsonl")
    rows, counts = read_labeled([path, more], "classification", max_rows=2, on_bad_row="skip")
    assert [row.row_id for row in rows] == [f"{path}:2", f"{path}:3"]
    assert (counts.rows, counts.kept, counts.lost) == (3, 2, 1)


def test_a_row_is_counted_as_cut_whichever_of_its_documents_was(tokenizers):
    tokenizer = add_gpt1_tokens(tokenizers["bpe"])
    for choices in ([TEXT, "cats"], ["cats", TEXT]):
        _, counts = encode_gpt1_choices([Choice("the fox", choices, 0, "r")], tokenizer, 10)
        assert counts.cut == {PAIR_CUT: 1} and counts.first == {PAIR_CUT: ["r"]}


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_a_cut_pair_fills_its_length_and_does_not_exceed_it(tokenizers, kind):
    row = LabeledText(TEXT, TEXT, "yes", "r")
    for length in (9, 10, 20):
        [example], counts = encode_texts([row], tokenizers[kind], length, NAMES)
        assert len(example.encoded.ids) == length and counts.cut == {PAIR_CUT: 1}


def test_a_long_question_loses_its_end(wordpiece):
    row = Question("over the lazy dog", TEXT, [("fox", TEXT.index("fox"))], "q")
    [whole], _ = encode_questions([row], wordpiece, 200, stride=50)
    [cut], counts = encode_questions([row], wordpiece, 200, stride=50, max_question=2)
    first, second = whole.encoded.starts
    assert cut.encoded.ids == whole.encoded.ids[: first + 2] + whole.encoded.ids[second - 1 :]
    assert counts.cut == {QUESTION_CUT: 1}
    assert text_of(wordpiece, cut.encoded.ids[cut.start : cut.end + 1]) == "fox"


def test_an_unknown_label_of_any_word_is_refused():
    rows = [LabeledWords(["a", "b"], ["no", "yes"], "r1"), LabeledWords(["a", "b"], ["no", "maybe"], "r2")]
    with pytest.raises(UserError, match="r2: label 'maybe' is unknown; known: no, yes"):
        require_labels(rows, NAMES)


def test_choices_are_pairs_of_context_and_choice(wordpiece):
    rows = [
        Choice("the quick fox", ["cats watch", "lazy dog jumps over the fox"], 1, "a"),
        Choice("over the dog", ["\u200b", "cats"], 0, "lost"),
        Choice("the dog", ["cats", "watch", "the fox"], 2, "b"),
    ]
    examples, counts = encode_choices(rows, wordpiece, 200)
    assert [example.row_id for example in examples] == ["a", "b"] and counts.dropped == {NO_TEXT: 1}
    for example, row in zip(examples, (rows[0], rows[2]), strict=True):
        assert example.label == row.label
        for pair, choice in zip(example.pairs, row.choices, strict=True):
            encoded = wordpiece(row.context, choice)
            assert (pair.ids, pair.segments) == (encoded["input_ids"], encoded["token_type_ids"])
    longest = max(len(pair.ids) for pair in examples[0].pairs)
    cut, counts = encode_choices(rows[:1], wordpiece, longest - 1)
    assert max(len(pair.ids) for pair in cut[0].pairs) == longest - 1
    assert counts.cut == {PAIR_CUT: 1}  # one of its choices was too long
    [batch] = collate_choices(examples, 1000)
    assert batch.weight == batch.ragged.weight == 2
    expected = {"a": (1, 2), "b": (2, 3)}
    order = list(dict.fromkeys(batch.ragged.row_ids))
    assert batch.labels.tolist() == [expected[name][0] for name in order]
    assert batch.rows.bincount().tolist() == [expected[name][1] for name in order]
    tokens = sum(len(pair.ids) for pair in examples[0].pairs)
    assert all(len(part.ragged.tokens) <= tokens for part in collate_choices(examples * 2, tokens))


def test_texts_for_infilling_leave_room_for_their_special_tokens(jsonl, wordpiece):
    path = jsonl({"text": " ".join([TEXT] * 3)})
    for objective, special in (("infilling", 3), ("prefix", 1)):
        for max_length in range(8, 24):
            examples, _ = prepare_text(DataConfig(path, max_length=max_length), objective, wordpiece)
            whole = sum(len(example.ids) for example in examples)
            assert max(len(example.ids) for example in examples) <= max_length - special
            assert len(examples) == -(-whole // (max_length - special))


def test_a_pair_counts_as_cut_whichever_text_was_long(wordpiece):
    for texts in (("cats", TEXT), (TEXT, "cats")):
        assert encode_texts([LabeledText(*texts, "yes", "r")], wordpiece, 10, NAMES)[1].cut == {PAIR_CUT: 1}


def test_a_pair_without_a_token_on_either_side_is_dropped(wordpiece):
    rows = [LabeledText("\u200b", "cats", "yes", "a"), LabeledText("cats", "\u200b", "yes", "b")]
    examples, counts = encode_texts(rows, wordpiece, 40, NAMES)
    assert examples == [] and counts.dropped == {NO_TEXT: 2}


def test_the_first_answer_is_the_one_to_learn(wordpiece):
    answers = [(word, TEXT.index(word)) for word in ("fox", "cats")]
    [window], _ = encode_questions([Question("the dog", TEXT, answers, "q")], wordpiece, 200, stride=50)
    assert text_of(wordpiece, window.encoded.ids[window.start : window.end + 1]) == "fox"


def test_windows_of_prepared_questions_are_as_asked(jsonl, wordpiece):
    answer = {"text": "fox", "answer_start": TEXT.index("fox")}
    path = jsonl({"question": "over the lazy dog", "context": " ".join([TEXT] * 3), "answers": [answer]})
    config = DataConfig(path, max_length=24)
    prepared = prepare_labeled(config, "question_answering", wordpiece, encode_questions, stride=5, max_question=2)
    windows = prepared.examples
    rows, _ = read_labeled(path, "question_answering")
    assert windows == encode_questions(rows, wordpiece, 24, stride=5, max_question=2)[0] and len(windows) > 3


def test_batches_of_several_sequences_and_texts_keep_to_the_limit_the_longest_first(tokenizers, wordpiece):
    tokenizer = add_gpt1_tokens(tokenizers["bpe"])
    rows = [Choice("the fox", ["cats", "lazy dog"] * (1 + n % 3), 1, str(n)) for n in range(9)]
    views, _ = encode_gpt1_choices(rows, tokenizer, 64)
    most = max(sum(map(len, example.documents)) for example in views)
    batches = collate_multi_sequence(views, most)
    assert all(len(batch.ragged.tokens) <= most for batch in batches) and len(batches) > 3
    texts = [LabeledText(" ".join(["cats"] * (1 + n % 7)), None, "yes", str(n)) for n in range(20)]
    lengths = [max(b.ragged.lengths) for b in collate_classes(encode_texts(texts, wordpiece, 64, NAMES)[0], 20)]
    assert lengths == sorted(lengths, reverse=True) and len(lengths) > 3


def test_gpt1_tokens_leave_a_tokenizers_own_special_tokens_special():
    plain = train_bpe([TEXT], 330, ("<s>", "</s>", "<pad>", "<turn>"))
    assert set(add_gpt1_tokens(plain).all_special_tokens) == {
        *plain.all_special_tokens,
        "<start>",
        "<delimiter>",
        "<extract>",
    }


@pytest.mark.parametrize("label", [0.5, -1, 2, "1.5", None])
def test_a_label_that_is_no_index_of_a_choice_is_refused(jsonl, label):
    with pytest.raises(UserError, match="number of a choice"):
        read_labeled(jsonl({"context": "c", "choices": ["x", "y"], "label": label}), "multiple_choice")
