"""Tokenizers as files: train, save, load here and in plain transformers, refuse what is foreign or broken."""

import json

import pytest

from alignment.data.text import chat
from alignment.data.tokenizers.tokenizer import check_vocabulary, read_tokenizer_files, save_tokenizer
from alignment.data.tokenizers.train import train_bpe
from alignment.errors import UserError

TEXT = "the cat  sat\n\non the mät 猫</s>"


def test_train_bpe_gives_the_special_tokens_the_first_ids_and_round_trips(bpe):
    assert (bpe.bos_token_id, bpe.eos_token_id, bpe.pad_token_id) == (0, 1, 2)
    assert bpe.decode(chat.prompt_ids(bpe, TEXT)) == "<s>" + TEXT
    assert len(bpe) <= 400


@pytest.mark.parametrize("model_type", [None, "llama", "gpt2"])
def test_saved_tokenizer_is_the_same_here_and_in_transformers(chatml, tmp_path, model_type):
    from transformers import AutoTokenizer

    save_tokenizer(chatml, tmp_path)
    if model_type:  # as in a model directory, where transformers may prefer the model type's own class
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 400}))
    for loaded in (read_tokenizer_files(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded.chat_template == chatml.chat_template
        assert loaded.all_special_ids == chatml.all_special_ids
        assert loaded(TEXT)["input_ids"] == chatml(TEXT)["input_ids"]
        assert chat.prompt_ids(loaded, TEXT) == chat.prompt_ids(chatml, TEXT)
        assert chat.end_token_id(loaded) == chat.end_token_id(chatml)


def test_saving_again_changes_no_byte_and_tells_nothing_of_this_machine(bpe, tmp_path):
    save_tokenizer(bpe, tmp_path / "first")
    save_tokenizer(read_tokenizer_files(tmp_path / "first"), tmp_path / "second")
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert (
        names
        == sorted(path.name for path in (tmp_path / "second").iterdir())
        == ["tokenizer.json", "tokenizer_config.json"]
    )
    for name in names:
        content = (tmp_path / "first" / name).read_bytes()
        assert content == (tmp_path / "second" / name).read_bytes()
        assert str(tmp_path).encode() not in content


def test_raw_pair_of_files_gets_pad_and_no_bos(tmp_path):
    trained = train_bpe(["the cat sat on the mat"] * 5, 280, ("<|endoftext|>", "b", "c")).backend_tokenizer
    trained.model.save(str(tmp_path))
    for old, new in [("vocab.json", "encoder.json"), ("merges.txt", "vocab.bpe")]:
        (tmp_path / old).rename(tmp_path / new)
    tokenizer = read_tokenizer_files(tmp_path)
    assert tokenizer.bos_token == tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.pad_token_id == trained.get_vocab_size()
    ids = chat.texts_ids(tokenizer, ["the cat"])[0]
    assert tokenizer.decode(ids) == "the cat<|endoftext|>"
    save_tokenizer(tokenizer, tmp_path / "saved")
    assert chat.texts_ids(read_tokenizer_files(tmp_path / "saved"), ["the cat"])[0] == ids


def test_directories_without_a_tokenizer_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        read_tokenizer_files(tmp_path / "missing")
    with pytest.raises(UserError, match=r"no tokenizer here.*found nothing"):
        read_tokenizer_files(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("key", ["auto_map", "trust_remote_code"])
def test_foreign_code_is_refused_by_key(bpe, tmp_path, file, key):
    save_tokenizer(bpe, tmp_path)
    config = json.loads((tmp_path / file).read_text()) if (tmp_path / file).exists() else {}
    (tmp_path / file).write_text(json.dumps({**config, key: {"AutoTokenizer": ["x.py", None]}}))
    (tmp_path / "x.py").write_text("open('touched', 'w')")
    with pytest.raises(UserError, match=f"{file}: {key} asks"):
        read_tokenizer_files(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"), [("tokenizer.json", "{"), ("tokenizer_config.json", "[1"), ("tokenizer_config.json", "[]")]
)
def test_broken_files_are_refused(bpe, tmp_path, file, content):
    save_tokenizer(bpe, tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=r"cannot be read|not valid JSON|JSON object"):
        read_tokenizer_files(tmp_path)


def test_vocabulary_that_does_not_fit_the_model_is_refused(bpe):
    check_vocabulary(bpe, len(bpe))
    with pytest.raises(UserError, match=rf"has 7 tokens that the model's vocabulary of {len(bpe) - 7} lacks"):
        check_vocabulary(bpe, len(bpe) - 7)


def test_a_tokenizer_with_several_named_templates_saves_and_loads(chatml, templates, tmp_path):
    from transformers import AutoTokenizer

    chatml.chat_template = {"default": templates["chatml"], "tool_use": templates["trimming"]}
    save_tokenizer(chatml, tmp_path / "model")
    for loaded in (read_tokenizer_files(tmp_path / "model"), AutoTokenizer.from_pretrained(tmp_path / "model")):
        assert loaded.chat_template == chatml.chat_template
    assert not any(path.name.startswith(".") for path in (tmp_path / "model").rglob("*"))
