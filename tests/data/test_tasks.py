"""Labeled rows to batches: texts, pairs, words, answers, choices, GPT-1's inputs; lost labels are counted."""

import gzip
import json

import pytest

from alignment.data.config import DataConfig
from alignment.data.tasks import (
    GPT1_TOKENS,
    NO_TEXT,
    PAIR_CUT,
    TEXT_END_CUT,
    LabeledRow,
    TaskFormat,
    add_gpt1_tokens,
    collate_tasks,
    encode_rows,
    label_ids,
    label_names,
    prepare_labeled,
    read_labeled,
    window_starts,
)
from alignment.data.tokenizers.tokenizer import read_tokenizer_files
from alignment.data.tokenizers.train import train_tokenizer
from alignment.errors import UserError
from alignment.losses.language import IGNORED

TEXT = "the quick brown fox jumps over the lazy dog while unbelievable cats watch from afar"
RACE = {"article": "a", "questions": ["q"], "options": [["x", "y"]], "answers": ["A"]}
KINDS = {"wordpiece": 120, "bpe": 330, "unigram": 60, "characters": None, "bytes": None}
NAMES = {0: "no", 1: "yes"}
CAT, CHOICES = {"question": "q", "context": "a cat"}, {"context": "c", "choices": ["x", "y"]}


@pytest.fixture(scope="module")
def tokenizers():
    return {kind: train_tokenizer(kind, [TEXT] * 5, size) for kind, size in KINDS.items()}


@pytest.fixture(scope="module")
def wordpiece(tokenizers):
    return tokenizers["wordpiece"]


def text_of(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True).strip()


def text_row(text, pair, label, row_id="r"):
    return LabeledRow((text, pair), (label,), row_id)


def question(asked, context, *answers, row_id="q"):
    """A question whose answers are words of the context."""
    return LabeledRow((asked, context), tuple((answer, context.index(answer)) for answer in answers), row_id)


def encode_texts(rows, tokenizer, max_length, *, task="pair_classification", form="tokenizer"):
    return encode_rows(rows, TaskFormat(task, form, max_length), tokenizer, NAMES)


def encode_questions(rows, tokenizer, max_length, **settings):
    return encode_rows(rows, TaskFormat("question_answering", max_length=max_length, **settings), tokenizer)


def ids_of(example):
    return example.encoded[0].ids


def answer_of(tokenizer, window):
    first, last = window.labels
    return text_of(tokenizer, ids_of(window)[first : last + 1])


def characters_of(window):
    """First and last token's characters of the answer."""
    return tuple(window.offsets[token] for token in window.labels)


def test_a_text_and_a_pair_are_encoded_and_truncated_at_the_longer_text(wordpiece):
    rows = [
        text_row("the quick fox", None, "yes", "a"),
        text_row("the lazy dog jumps over the quick brown fox", None, "no", "b"),
        text_row("the lazy dog jumps over the quick brown fox", "cats watch", "no", "c"),
    ]
    whole, _ = encode_texts(rows, wordpiece, 200)
    cut, counts = encode_texts(rows, wordpiece, len(ids_of(whole[0])))
    assert [example.labels for example in whole] == [[1], [0], [0]]
    assert cut[0] == whole[0]
    assert ids_of(cut[1])[:-1] == ids_of(whole[1])[: len(ids_of(whole[0])) - 1]
    assert counts.cut == {TEXT_END_CUT: 1, PAIR_CUT: 1} and len(ids_of(cut[2])) == len(ids_of(whole[0]))
    assert counts.tokens == sum(len(ids_of(example)) for example in cut)
    [batch] = collate_tasks(whole, 1000)
    assert batch.weight == batch.ragged.weight == 3
    assert dict(zip(batch.ragged.row_ids, batch.labels.tolist(), strict=True)) == {"a": 1, "b": 0, "c": 0}
    segments = sum(whole[2].encoded[0].segments)
    assert batch.ragged.segments.sum() == segments == len(wordpiece("cats watch")["input_ids"]) - 1
    [single] = collate_tasks(whole[:2], 1000)
    assert single.ragged.segments is None
    assert sum(part.weight for part in collate_tasks(whole, 20)) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_words_label_stands_at_its_first_token_whatever_the_tokenizer(tokenizers, kind):
    tokenizer, words = tokenizers[kind], ["unbelievable", "cats", "watch", "the", "dog"]
    row = LabeledRow((words,), ("a", "b", "a", "b", "c"), "r")
    [example], counts = encode_rows([row], TaskFormat("token_classification"), tokenizer, {0: "a", 1: "b", 2: "c"})
    positions = [position for position, label in enumerate(example.labels) if label != IGNORED]
    assert [example.labels[position] for position in positions] == [0, 1, 0, 1, 2] and not counts.cut
    assert list(example.word_tokens) == positions
    ends = [*positions[1:], len(ids_of(example))]
    assert [text_of(tokenizer, ids_of(example)[a:b]) for a, b in zip(positions, ends, strict=True)] == words
    assert all(example.encoded[0].is_text[position] for position in positions)
    [batch] = collate_tasks([example], 1000)
    assert batch.weight == 5 and batch.labels.tolist() == example.labels
    assert len(batch.labels) == len(batch.ragged.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_found_again_from_its_tokens(tokenizers, kind):
    tokenizer = tokenizers[kind]
    for answer in ("the", "quick brown", "unbelievable cats", "afar", "lazy"):
        [window], _ = encode_questions([question("over the dog", TEXT, answer)], tokenizer, 300, stride=50)
        assert answer_of(tokenizer, window) == answer
        first, last = characters_of(window)
        assert TEXT[first[0] : last[1]].strip() == answer


def test_windows_overlap_reach_the_end_and_count_where_the_answer_is_not(wordpiece):
    context = " ".join([TEXT] * 4)
    row, start = question("the dog", context, "afar"), context.index("afar")
    windows, counts = encode_questions([row], wordpiece, 48, stride=20)
    assert all(len(ids_of(window)) <= 48 for window in windows)
    seen = {offset for window in windows for offset in window.offsets if offset is not None}
    [whole], _ = encode_questions([row], wordpiece, 1000, stride=100)
    assert seen == {offset for offset in whole.offsets if offset is not None}
    with_answer = [window for window in windows if window.labels != [0, 0]]
    assert 0 < len(with_answer) < len(windows)
    assert not counts.cut
    for window in with_answer:
        first, last = characters_of(window)
        assert (first[0], last[1]) == (start, start + 4)
    batches = collate_tasks(windows, 100)
    assert sum(batch.weight for batch in batches) == len(windows)
    for batch in batches:
        for first, (start, end) in zip(batch.ragged.firsts.tolist(), batch.labels.view(-1, 2).tolist(), strict=True):
            ids = batch.ragged.tokens[first + start : first + end + 1]
            assert start == end == 0 or text_of(wordpiece, ids) == "afar"


@pytest.mark.parametrize(
    ("length", "room", "stride", "expected"),
    [(0, 5, 3, [0]), (5, 5, 3, [0]), (6, 5, 3, [0, 3]), (8, 5, 3, [0, 3]), (9, 5, 3, [0, 3, 6]), (10, 5, 5, [0, 5])],
)
def test_window_starts(length, room, stride, expected):
    assert window_starts(length, room, stride) == expected


def test_a_stride_that_skips_text_is_refused(wordpiece):
    with pytest.raises(UserError, match="stride must be from 1 to"):
        encode_questions([question("the dog", TEXT)], wordpiece, 30, stride=30)


def test_gpt1_inputs(tokenizers):
    plain = tokenizers["bpe"]
    tokenizer = add_gpt1_tokens(plain)
    assert len(tokenizer) == len(plain) + 3 and "<start>" not in plain.get_vocab()
    assert len(add_gpt1_tokens(tokenizer)) == len(tokenizer)
    start, delimiter, extract = (tokenizer.convert_tokens_to_ids(token) for token in GPT1_TOKENS)
    a, b, c = (plain(text, add_special_tokens=False)["input_ids"] for text in ("the fox", "lazy dog", "cats"))
    one, pair = text_row("the fox", None, "no", "a"), text_row("the fox", "lazy dog", "yes", "b")
    choices = LabeledRow(("the fox", ["cats", "lazy dog"]), (1,), "c")

    classes, _ = encode_texts([one, pair], tokenizer, 64, form="gpt1")
    assert [example.documents for example in classes] == [[[start, *a, extract]], [[start, *a, delimiter, *b, extract]]]
    [similar], _ = encode_texts([pair], tokenizer, 64, form="gpt1_similarity")
    assert similar.documents == [[start, *a, delimiter, *b, extract], [start, *b, delimiter, *a, extract]]
    [choice], _ = encode_texts([choices], tokenizer, 64, task="multiple_choice", form="gpt1")
    assert choice.documents == [[start, *a, delimiter, *c, extract], [start, *a, delimiter, *b, extract]]
    assert (choice.labels, similar.labels, classes[0].labels) == ([1], [1], [0])

    [batch] = collate_tasks([classes[0], similar, choice], 1000)
    assert batch.weight == 3
    assert (batch.ragged.tokens[batch.ragged.last] == extract).all()
    order = list(dict.fromkeys(batch.ragged.row_ids))
    documents, labels = {"a": 1, "b": 2, "c": 2}, {"a": 0, "b": 1, "c": 1}
    assert batch.rows.bincount().tolist() == [documents[name] for name in order]
    assert batch.labels.tolist() == [labels[name] for name in order]
    assert len(batch.ragged.target_index) == len(batch.ragged.tokens) - 5  # every token but each first one
    cut, counts = encode_texts([pair], tokenizer, 3 + len(a) + len(b) - 1, form="gpt1")
    assert sum(counts.cut.values()) == 1 and len(cut[0].documents[0]) == 3 + len(a) + len(b) - 1


def test_choices_are_pairs_of_context_and_choice(wordpiece):
    rows = [
        LabeledRow(("the quick fox", ["cats watch", "lazy dog jumps over the fox"]), (1,), "a"),
        LabeledRow(("over the dog", ["\u200b", "cats"]), (0,), "lost"),
        LabeledRow(("the dog", ["cats", "watch", "the fox"]), (2,), "b"),
    ]
    examples, counts = encode_texts(rows, wordpiece, 200, task="multiple_choice")
    assert [example.row_id for example in examples] == ["a", "b"] and counts.dropped == {NO_TEXT: 1}
    for example, row in zip(examples, (rows[0], rows[2]), strict=True):
        context, choices = row.inputs
        assert example.labels == list(row.labels)
        for pair, choice in zip(example.encoded, choices, strict=True):
            encoded = wordpiece(context, choice)
            assert (pair.ids, pair.segments) == (encoded["input_ids"], encoded["token_type_ids"])
    longest = max(map(len, examples[0].documents))
    cut, counts = encode_texts(rows[:1], wordpiece, longest - 1, task="multiple_choice")
    assert max(map(len, cut[0].documents)) == longest - 1
    assert counts.cut == {PAIR_CUT: 1}  # one of its choices was too long
    [batch] = collate_tasks(examples, 1000)
    assert batch.weight == batch.ragged.weight == 2
    expected = {"a": (1, 2), "b": (2, 3)}
    order = list(dict.fromkeys(batch.ragged.row_ids))
    assert batch.labels.tolist() == [expected[name][0] for name in order]
    assert batch.rows.bincount().tolist() == [expected[name][1] for name in order]
    tokens = sum(map(len, examples[0].documents))
    assert all(len(part.ragged.tokens) <= tokens for part in collate_tasks(examples * 2, tokens))


def test_label_names_are_sorted_as_numbers_where_they_are_numbers():
    rows = [text_row("x", None, label, label) for label in ("10", "2", "2", "0")]
    assert label_names(rows) == {0: "0", 1: "2", 2: "10"}
    words = [LabeledRow((["a", "b"],), ("O", "B-PER"), "w"), LabeledRow((["c"],), ("I-PER",), "v")]
    assert label_names(words) == {0: "B-PER", 1: "I-PER", 2: "O"}
    with pytest.raises(UserError, match="same label"):
        label_names(rows[1:3])
    with pytest.raises(UserError, match="10: label '10' is unknown; known: 0, 2"):
        label_ids(rows, {0: "0", 1: "2"})
    with pytest.raises(UserError, match="w: label 'B-PER' is unknown; known: O, I-PER"):
        label_ids(words, {0: "O", 1: "I-PER"})


@pytest.mark.parametrize(
    ("task", "values", "inputs", "labels"),
    [
        ("classification", {"text": "a", "label": 1.0}, ("a", None), ("1",)),
        (
            "question_answering",
            CAT | {"answers": {"text": ["cat"], "answer_start": [2]}},
            ("q", "a cat"),
            (("cat", 2),),
        ),
        ("multiple_choice", CHOICES | {"label": "1"}, ("c", ["x", "y"]), (1,)),
        ("token_classification", {"words": ["a", "b"], "labels": [0, 2]}, (["a", "b"],), ("0", "2")),
        ("regression", {"text": "a", "pair": "b", "label": "2.5"}, ("a", "b"), (2.5,)),
        ("regression", {"text": "a", "label": 3}, ("a", None), (3.0,)),
        ("regression", {"sentence1": "a", "sentence2": "b", "label": 0}, ("a", "b"), (0.0,)),
        ("pair_classification", {"premise": "a", "hypothesis": "b", "label": 2}, ("a", "b"), ("2",)),
        (
            "multiple_choice",
            {"premise": "It rained.", "choice1": "x", "choice2": "y", "question": "effect", "label": 1, "idx": 0},
            ("It rained. What happened as a result?", ["x", "y"]),
            (1,),
        ),
        (
            "multiple_choice",
            {f"InputSentence{n}": f"{n}." for n in range(1, 5)}
            | {"RandomFifthSentenceQuiz1": "x", "RandomFifthSentenceQuiz2": "y", "AnswerRightEnding": "2"},
            ("1. 2. 3. 4.", ["x", "y"]),
            (1,),
        ),
        (
            "multiple_choice",
            {"startphrase": "A. She", "sent1": "A.", "sent2": "She", "label": "3"}
            | {f"ending{n}": f"goes {n}." for n in range(4)},
            ("A.", ["She goes 0.", "She goes 1.", "She goes 2.", "She goes 3."]),
            (3,),
        ),
        (
            "multiple_choice",
            {"article": "Text.", "question": "Why?", "options": ["x", "y"], "answer": "B"},
            ("Text.", ["Why? x", "Why? y"]),
            (1,),
        ),
    ],
)
def test_rows_of_each_task(jsonl, task, values, inputs, labels):
    path = jsonl(values)
    assert read_labeled(path, task)[0] == [LabeledRow(inputs, labels, f"{path}:1")]


def test_a_file_of_race_is_one_row_for_each_question(tmp_path):
    path = tmp_path / "high1.txt"
    asked = {"questions": ["Why?", "It is _ ."], "options": [["x", "y"], ["z", "w"]], "answers": ["B", "A"]}
    path.write_text(json.dumps({"article": "One.\n\nTwo.", "id": "high1.txt", **asked}))
    assert read_labeled(str(path), "multiple_choice")[0] == [
        LabeledRow(("One.\n\nTwo.", ["Why? x", "Why? y"]), (1,), f"{path}:1[1]"),
        LabeledRow(("One.\n\nTwo.", ["It is z .", "It is w ."]), (0,), f"{path}:1[2]"),
    ]
    path.write_text('{"article": ')
    with pytest.raises(UserError, match=r"high1\.txt:1:text: is not JSON"):
        read_labeled(str(path), "multiple_choice")


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("classification", {"text": "a"}, "label: must be a label"),
        ("classification", {"text": "a", "label": -1}, "label: must be a label"),
        ("classification", {"text": " ", "label": 1}, "text: is only white space"),
        ("pair_classification", {"text": "a", "label": 1}, "pair: missing"),
        ("token_classification", {"words": ["a"], "labels": ["x", "y"]}, "must be as many as words"),
        *(
            ("question_answering", CAT | {"answers": [{"text": "cat", "answer_start": n}]}, "is not where")
            for n in (3, -3)
        ),
        ("question_answering", CAT, "answers: must be a list"),
        *(("multiple_choice", CHOICES | {"label": n}, "number of a choice") for n in (0.5, -1, 2, "1.5", None)),
        ("multiple_choice", RACE | {"answers": ["C"]}, "answers: must be the letter of an option.*'C' of 2"),
        ("multiple_choice", RACE | {"answers": ["A", "B"]}, "must be as many as options and answers"),
        ("multiple_choice", RACE | {"options": [["x", 1]]}, "options: must be text, is a number"),
        ("multiple_choice", {"premise": "a", "choice1": "b", "question": "why"}, "must be cause or effect"),
        ("multiple_choice", {"InputSentence1": "a", "AnswerRightEnding": 0}, "AnswerRightEnding: must be 1 or 2"),
        ("multiple_choice", {"sent1": "a", "sent2": "b", "ending0": "c"}, "ending1: missing"),
        *(("regression", {"text": "a", "label": n}, "label: must be a") for n in (None, "x", True, "nan")),
        ("regression", {"text": "a", "pair": None, "label": 1}, "pair: must be text, is null"),
    ],
)
def test_bad_rows_are_reported_with_their_line_or_counted(jsonl, task, row, message):
    good = {
        "classification": {"text": "a", "label": 1},
        "pair_classification": {"text": "a", "pair": "b", "label": 1},
        "token_classification": {"words": ["a"], "labels": ["x"]},
        "question_answering": CAT | {"answers": []},
        "multiple_choice": CHOICES | {"label": 0},
        "regression": {"text": "a", "label": 1},
    }[task]
    path = jsonl(good, row, b"{")
    with pytest.raises(UserError, match=f"(?s)2 bad rows.*:2:.*{message}.*:3:.*not JSON"):
        read_labeled(path, task)
    rows, counts = read_labeled(path, task, on_bad_row="skip")
    assert (len(rows), counts.lost, counts.kept, counts.rows) == (1, 2, 1, 3)


def test_one_call_from_config_to_examples_and_names(jsonl, wordpiece):
    train = jsonl({"text": "the fox", "label": "yes"}, {"text": "the dog", "label": "no"})
    held_out = jsonl({"text": "cats", "label": "maybe"}, name="held.jsonl")
    config, form = DataConfig(train=train, evaluation=held_out, max_length=32), TaskFormat("classification")
    prepared = prepare_labeled(config, form, wordpiece)
    assert prepared.names == NAMES and [example.labels for example in prepared.examples] == [[1], [0]]
    assert prepared.counts.documents == 2
    with pytest.raises(UserError, match="'maybe' is unknown; known: no, yes"):
        prepare_labeled(config, form, wordpiece, "evaluation", names=prepared.names)
    tokenizer = add_gpt1_tokens(wordpiece)
    sequences = prepare_labeled(config, TaskFormat("classification", "gpt1"), tokenizer).examples
    assert sequences[0].documents[0][-1] == tokenizer.convert_tokens_to_ids("<extract>")


@pytest.mark.real_data
def test_every_xquad_answer_is_found_again(real_data):
    tokenizer = read_tokenizer_files(real_data / "tokenizers" / "bert_uncased")
    rows, counts = read_labeled(str(real_data / "xquad_en" / "xquad_en.jsonl.gz"), "question_answering")
    assert counts.kept == counts.rows == 948
    windows, _ = encode_questions(rows, tokenizer, 384, stride=128)
    found, whole = set(), 0
    labeled = [window for window in windows if window.labels[0]]
    for window in labeled:
        text, start = rows[window.question].labels[0]
        first, last = (window.offsets[window.labels[0]][0], window.offsets[window.labels[1]][1])
        assert first <= start and last >= start + len(text)
        whole += (first, last) == (start, start + len(text))
        found.add(window.question)
    assert len(found) == len(rows)
    assert whole >= 0.98 * len(labeled)  # the others begin or end within a word


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("path", "task", "columns"),
    [
        ("mrpc/train", "pair_classification", {}),
        ("rte/train", "pair_classification", {}),
        ("sst2/dev", "classification", {"text": "sentence"}),
        ("cola/train", "classification", {"text": "sentence"}),
        ("mrpc/test", "pair_classification", {"text": "sentence1", "pair": "sentence2"}),
        ("rte/dev", "pair_classification", {"text": "sentence1", "pair": "sentence2"}),
    ],
)
def test_glue_rows_are_read_and_encoded_as_transformers_does(real_data, path, task, columns):
    file = real_data / f"{path}.jsonl.gz"
    tokenizer = read_tokenizer_files(real_data / "tokenizers" / "bert_uncased")
    prepared = prepare_labeled(DataConfig(train=str(file), columns=columns), TaskFormat(task), tokenizer)
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        raw = [json.loads(line) for line in lines]
    assert prepared.counts.kept == len(raw) and not prepared.counts.cut and prepared.names == {0: "0", 1: "1"}
    for row, example in list(zip(raw, prepared.examples, strict=True))[:200]:
        encoded = tokenizer(*[row[column] for column in columns.values() or ("sentence1", "sentence2")])
        assert ids_of(example) == encoded["input_ids"]
        assert example.encoded[0].segments == encoded["token_type_ids"]
        assert example.labels == [int(row["label"])]
