"""Tokenizers of every kind: trained, saved, opened by plain transformers; and real ones against published encodings."""

import gzip
import json

import pytest

from alignment.data.tokenizers.load import read_tokenizer_files, save_tokenizer
from alignment.data.tokenizers.train import train_tokenizer
from alignment.errors import UserError

TEXTS = ["The cat sat on the mat, and the other cat watched.", "Ünïted in 1999\n  <extra_id_0> </s>"] * 10
KINDS = [
    ("bpe", 320, {}),
    ("wordpiece", 90, {}),
    ("unigram", 90, {"sentinels": 10}),
    ("bytes", None, {}),
    ("characters", None, {}),
]


@pytest.mark.parametrize(("kind", "vocabulary", "options"), KINDS)
def test_every_kind_is_the_same_saved_and_in_plain_transformers(kind, vocabulary, options, tmp_path):
    from transformers import AutoTokenizer

    trained = train_tokenizer(kind, iter(TEXTS), vocabulary, **options)
    assert vocabulary is None or len(trained) <= vocabulary
    save_tokenizer(trained, tmp_path)
    for loaded in (read_tokenizer_files(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded.get_vocab() == trained.get_vocab()
        assert loaded.all_special_ids == trained.all_special_ids
        for text in [*TEXTS[:2], "the 猫\tsat "]:
            assert loaded(text, "cat").data == trained(text, "cat").data
            assert loaded.decode(loaded(text)["input_ids"]) == trained.decode(trained(text)["input_ids"])


@pytest.mark.parametrize(("kind", "vocabulary"), [("bpe", 320), ("bytes", None), ("characters", None)])
def test_kinds_that_lose_nothing_round_trip(kind, vocabulary):
    tokenizer = train_tokenizer(kind, TEXTS, vocabulary)
    for text in TEXTS[:2]:
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert tokenizer.decode(ids) == text


def test_wordpiece_has_berts_marks_pairs_and_types():
    tokenizer = train_tokenizer("wordpiece", TEXTS, 90)
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer.convert_tokens_to_ids(marks) == [0, 1, 2, 3, 4]
    encoded = tokenizer("The CAT", "sät")
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    edge = tokens.index("[SEP]") + 1
    assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]" and "[UNK]" not in tokens
    assert encoded["token_type_ids"] == [0] * edge + [1] * (len(tokens) - edge)
    assert tokenizer.decode(encoded["input_ids"], skip_special_tokens=True) == "the cat sat"
    cased = train_tokenizer("wordpiece", TEXTS, 90, lowercase=False)
    assert cased.decode(cased("The cat")["input_ids"], skip_special_tokens=True) == "The cat"


def test_unigram_has_t5s_marks_and_descending_sentinels():
    tokenizer = train_tokenizer("unigram", TEXTS, 90, sentinels=10)
    assert tokenizer.convert_tokens_to_ids(["<pad>", "</s>", "<unk>"]) == [0, 1, 2]
    last = len(tokenizer) - 1
    assert tokenizer.convert_tokens_to_ids([f"<extra_id_{n}>" for n in range(10)]) == list(range(last, last - 10, -1))
    ids = tokenizer("the  cat\nsat ")["input_ids"]
    assert ids[-1] == 1 and tokenizer.decode(ids[:-1]) == "the cat sat"


def test_bytes_are_byt5s_ids_and_transformers_agrees():
    from transformers import ByT5Tokenizer

    tokenizer, published = train_tokenizer("bytes", []), ByT5Tokenizer()
    assert len(tokenizer) == 384 == len(published)
    assert tokenizer("hé")["input_ids"] == [ord("h") + 3, 0xC3 + 3, 0xA9 + 3, 1]
    for text in ["Life is like\ta box \n of chöcolates.", "猫 \x00\x7f ", "</s>a<extra_id_3>"]:
        assert tokenizer(text)["input_ids"] == published(text)["input_ids"]
    every = "".join(map(chr, range(0x20, 0x800)))
    assert tokenizer(every)["input_ids"] == [byte + 3 for byte in every.encode()] + [1]


def test_characters_are_one_token_each_and_strange_ones_are_unknown():
    tokenizer = train_tokenizer("characters", ["hello\nworld"])
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == ["</s>", "<pad>", "<unk>", *"\ndehlorw"]
    assert tokenizer("hello hz\n")["input_ids"].count(tokenizer.unk_token_id) == 2


def test_training_twice_gives_the_same_tokenizer():
    texts = [f"{text} {chr(0x61 + n)}{chr(0x7A - n)} {n}" for n in range(20) for text in TEXTS[:2]]
    for kind, vocabulary, options in KINDS:
        first, second = (
            train_tokenizer(kind, iter(texts), vocabulary and vocabulary + 60, **options).backend_tokenizer.to_str()
            for _ in range(2)
        )
        assert json.loads(first) == json.loads(second), kind


@pytest.mark.parametrize(
    ("kind", "vocabulary", "options", "message"),
    [
        ("letters", 100, {}, "unknown kind"),
        ("unigram", None, {}, "needs the size"),
        ("bytes", 300, {}, "size of its own"),
        ("wordpiece", 10, {}, "too small"),
        ("unigram", 12, {}, "cannot be"),
        ("unigram", 20, {"sentinels": 18}, "no room"),
        ("characters", None, {"sentinels": 3}, "no such option: 'sentinels'"),
    ],
)
def test_what_cannot_be_trained_is_refused(kind, vocabulary, options, message):
    with pytest.raises(UserError, match=message):
        train_tokenizer(kind, TEXTS, vocabulary, **options)
    with pytest.raises(UserError, match="no characters"):
        train_tokenizer("characters", [])


def test_a_raw_wordpiece_vocabulary_is_read_cased_or_not(tmp_path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "é"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    assert read_tokenizer_files(tmp_path)("The CATS")["input_ids"] == [2, 5, 6, 7, 3]
    (tmp_path / "vocab.txt").write_text("\n".join([*pieces, "The"]), encoding="utf-8")
    assert read_tokenizer_files(tmp_path / "vocab.txt")("The CATS é")["input_ids"] == [2, 9, 1, 8, 3]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.txt", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n", r"\[MASK\] is missing"),
        ("vocab.txt", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\nthe\n", ":6: 'the' stands in the vocabulary twice"),
        ("vocab.txt", b"\xff", "not UTF-8"),
        ("spiece.model", b"nonsense", "not a SentencePiece model"),
        ("spiece.model", b"", "no pieces"),
        ("notes.txt", b"the", "no tokenizer file"),
    ],
)
def test_broken_raw_files_are_told(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_tokenizer_files(tmp_path / name)


def test_several_raw_files_are_not_guessed_at(tmp_path):
    for name in ("a.model", "b.model"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"several tokenizers here: a\.model, b\.model"):
        read_tokenizer_files(tmp_path)


@pytest.mark.real_data
@pytest.mark.parametrize("name", ["gpt2", "bert_uncased"])
def test_published_encodings_are_reproduced(real_data, name):
    tokenizer = read_tokenizer_files(real_data / "tokenizers" / name)
    golden = json.loads((real_data / "tokenizers" / name / "golden_short.json").read_text(encoding="utf-8"))
    assert len(golden) == 18
    for row in golden:
        encoded = tokenizer(row["input"])
        assert {key: encoded[key] for key in row["encoded"]} == row["encoded"]
        if name == "gpt2":  # the published decoding drops blanks before punctuation; this one gives the text back
            assert tokenizer.decode(row["encoded"]["input_ids"]) == row["input"]
        else:
            assert tokenizer.decode(row["encoded"]["input_ids"]) == row["decoded_with_special"]
            assert (
                tokenizer.decode(row["encoded"]["input_ids"], skip_special_tokens=True)
                == row["decoded_without_special"]
            )


@pytest.mark.real_data
def test_bert_gives_the_published_ids_of_all_squad_questions(real_data):
    folder = real_data / "tokenizers" / "bert_uncased"
    with gzip.open(folder / "golden_squad_questions.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 8493
    tokenizer = read_tokenizer_files(folder)
    ids = tokenizer([row["text"] for row in rows], add_special_tokens=False)["input_ids"]
    assert ids == [row["ids"] for row in rows]
    assert [tokenizer.convert_ids_to_tokens(row) for row in ids] == [row["wordpiece"] for row in rows]


# Encodings by the sentencepiece library itself (0.2.3); ALBERT's [CLS] and [SEP] are not its doing, nor small letters.
SENTENCEPIECE = {
    "albert_spiece": {
        "this is a test": [48, 25, 21, 1289],
        "i was born in 92000, and this is": [31, 23, 386, 19, 561, 3050, 15, 17, 48, 25],
    },
    "botchan_unigram_1k": {"This is a test": [284, 47, 11, 4, 15, 400]},
    "hf_test_unigram_1k": {"This is a test": [285, 46, 10, 170, 382]},
    "hf_test_bpe_1k": {"This is a test": [474, 97, 5, 3, 263]},
}


@pytest.mark.real_data
@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_models_give_sentencepieces_ids(real_data, name, tmp_path):
    tokenizer = read_tokenizer_files(real_data / "tokenizers" / "sentencepiece" / f"{name}.model")
    save_tokenizer(tokenizer, tmp_path)
    for text, ids in SENTENCEPIECE[name].items():
        for one in (tokenizer, read_tokenizer_files(tmp_path)):
            assert one(text, add_special_tokens=False)["input_ids"] == ids
            assert one.decode(ids) == text
    if name == "albert_spiece":
        assert tokenizer("This is a test")["input_ids"] == [2, 48, 25, 21, 1289, 3]
        assert len(tokenizer) == 30_000


@pytest.mark.real_data
@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_models_agree_with_the_library_on_a_book(real_data, name):
    library = pytest.importorskip("sentencepiece")
    path = real_data / "tokenizers" / "sentencepiece" / f"{name}.model"
    tokenizer, theirs = read_tokenizer_files(path), library.SentencePieceProcessor(model_file=str(path))
    lines = (real_data / "tokenizers" / "sentencepiece" / "botchan.txt").read_text(encoding="utf-8").split("\n")
    lines = [line.lower() if name == "albert_spiece" else line for line in [*lines, "  ｆｕｌｌ   ｗｉｄｔｈ ① ", ""]]
    assert tokenizer(lines, add_special_tokens=False)["input_ids"] == theirs.encode(lines)


def test_sentinels_come_in_the_order_of_their_numbers():
    tokenizer = train_tokenizer("unigram", TEXTS, 90, sentinels=12)
    names = [f"<extra_id_{number}>" for number in range(12)]
    assert [token for token in tokenizer.all_special_tokens if token in names] == names


def write_sentencepiece(path, pieces, byte_fallback=False, kind=1, **normalizer):
    """A SentencePiece model, unigram (1) or merges (2), with these pieces and scores after <unk>, <s> and </s>; bytes at the end."""
    from transformers.convert_slow_tokenizer import import_protobuf

    model = import_protobuf().ModelProto()
    for number, (piece, score) in enumerate([("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *pieces.items()]):
        model.pieces.add(piece=piece, score=score, type=2 if number == 0 else 3 if number < 3 else 1)
    for byte in range(256 if byte_fallback else 0):
        model.pieces.add(piece=f"<0x{byte:02X}>", score=0.0, type=6)
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = kind, byte_fallback
    for name, value in normalizer.items():
        setattr(model.normalizer_spec, name, value)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize(("add_dummy_prefix", "expected"), [(True, ["▁a", "▁b"]), (False, ["a", "▁b"])])
def test_a_sentencepiece_model_says_whether_a_blank_comes_first(tmp_path, add_dummy_prefix, expected):
    pieces = {"▁a": -1.0, "a": -2.0, "▁b": -1.0, "▁": -3.0, "A": -9.0}
    path = write_sentencepiece(tmp_path / "x.model", pieces, add_dummy_prefix=add_dummy_prefix)
    tokenizer = read_tokenizer_files(path)
    assert tokenizer.tokenize("a b") == expected
    assert tokenizer.decode(tokenizer("a b", add_special_tokens=False)["input_ids"]) == "a b"


@pytest.mark.parametrize("add_dummy_prefix", [True, False])
def test_a_sentencepiece_model_spells_unknown_characters_in_bytes_where_it_has_them(tmp_path, add_dummy_prefix):
    """And its decoder leaves every blank but the one that it put first."""
    pieces, first = {"▁a": -1.0, "a": -2.0, "▁": -3.0, "A": -9.0}, "▁a" if add_dummy_prefix else "a"
    path = write_sentencepiece(
        tmp_path / "x.model", pieces, byte_fallback=True, add_dummy_prefix=add_dummy_prefix,
        remove_extra_whitespaces=False,
    )  # fmt: skip
    with_bytes = read_tokenizer_files(path)
    assert with_bytes.tokenize("a a 猫") == [first, "▁a", "▁", "<0xE7>", "<0x8C>", "<0xAB>"]
    for text in ("a a 猫 a", "a  a"):
        assert with_bytes.decode(with_bytes(text, add_special_tokens=False)["input_ids"]) == text
    without = read_tokenizer_files(write_sentencepiece(tmp_path / "y.model", pieces))
    assert without("a 猫", add_special_tokens=False)["input_ids"][-1] == without.unk_token_id


@pytest.mark.parametrize(("kind", "vocabulary"), [("unigram", 90), ("bytes", None)])
def test_each_text_of_a_pair_ends_in_the_end_token(kind, vocabulary):
    tokenizer = train_tokenizer(kind, TEXTS, vocabulary)
    one, two = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("the cat", "sat"))
    end = tokenizer.eos_token_id
    assert tokenizer("the cat", "sat")["input_ids"] == [*one, end, *two, end]


def test_wordpiece_has_inner_pieces_for_characters_within_words_alone():
    vocabulary = train_tokenizer("wordpiece", ["xat yat"] * 5, 30).get_vocab()
    assert {"x", "y", "##a", "##t"} <= set(vocabulary) and not {"##x", "##y"} & set(vocabulary)


def test_a_sentencepiece_model_of_merges_takes_the_best_piece_first_and_bytes_for_the_rest(tmp_path):
    pieces = {"▁ab": -1.0, "bc": -2.0, "ab": -3.0, "▁": -4.0, "a": -5.0, "b": -6.0, "c": -7.0, "A": -9.0}
    path = write_sentencepiece(tmp_path / "x.model", pieces, byte_fallback=True, kind=2, add_dummy_prefix=True)
    tokenizer = read_tokenizer_files(path)
    assert tokenizer.tokenize("abc") == ["▁", "a", "bc"]  # "bc" comes before "ab", without which there is no "▁ab"
    assert tokenizer.tokenize("ab猫") == ["▁ab", "<0xE7>", "<0x8C>", "<0xAB>"]
    assert tokenizer.decode(tokenizer("ab abc猫", add_special_tokens=False)["input_ids"]) == "ab abc猫"


def test_turn_markers_of_a_trained_bpe_are_special():
    specials = ("<s>", "</s>", "<pad>", "<|turn|>")
    assert set(train_tokenizer("bpe", TEXTS, 320, special_tokens=specials).all_special_tokens) == set(specials)


@pytest.mark.parametrize("lowercase", [False, True])
def test_unigram_keeps_capitals_unless_told_otherwise(lowercase):
    tokenizer = train_tokenizer("unigram", TEXTS, 90, lowercase=lowercase)
    ids = tokenizer("The cat", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == ("the cat" if lowercase else "The cat")


def test_each_of_several_line_breaks_is_a_character():
    tokenizer = train_tokenizer("characters", ["ab\n"])
    assert len(tokenizer("a\n\n\nb")["input_ids"]) == 5
    assert tokenizer.decode(tokenizer("a\n\n\nb")["input_ids"]) == "a\n\n\nb"


def test_a_wordpiece_vocabulary_has_room_for_the_characters_or_is_refused():
    needed = len(train_tokenizer("wordpiece", ["ab ba"], 9))  # five marks, a, b, ##a, ##b
    assert needed == 9
    with pytest.raises(UserError, match=r"of 8 is too small.* need 9"):
        train_tokenizer("wordpiece", ["ab ba"], 8)


def test_a_sentencepiece_model_says_whether_runs_of_blanks_are_one(tmp_path):
    pieces = {"▁a": -1.0, "a": -2.0, "▁": -3.0, "A": -9.0}
    for remove, expected in ((True, ["▁a", "▁a"]), (False, ["▁a", "▁", "▁a", "▁"])):
        path = write_sentencepiece(tmp_path / "x.model", pieces, remove_extra_whitespaces=remove)
        assert read_tokenizer_files(path).tokenize("a  a ") == expected


def test_neighboring_unknown_characters_of_merges_are_one_unknown_token(tmp_path):
    path = write_sentencepiece(tmp_path / "x.model", {"▁a": -1.0, "▁": -2.0, "a": -3.0, "A": -9.0}, kind=2)
    assert read_tokenizer_files(path).tokenize("a猫犬") == ["▁a", "<unk>"]
