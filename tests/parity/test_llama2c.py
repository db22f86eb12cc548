"""A real trained checkpoint: stories260K, converted, decodes its published text and has its known loss."""

import importlib.util
import json
import struct
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from alignment.config.load import packaged_folder
from alignment.errors import UserError
from alignment.models.huggingface.checkpoint import load_language_model
from alignment.pipeline.stages import load_stage_file
from alignment.ragged import Ragged

import_llama2c: Any = load_stage_file(packaged_folder("recipes") / "stories/llama2c.py")
SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "import_llama2c.py"
spec = importlib.util.spec_from_file_location("import_llama2c", SCRIPT)
importer = importlib.util.module_from_spec(spec)
sys.modules["import_llama2c"] = importer
spec.loader.exec_module(importer)


@pytest.fixture
def stories(data_folder, tmp_path, monkeypatch):
    """The converted directory and the folder it came from."""
    source = data_folder / "stories260k"
    arguments = [str(source / "stories260K.bin"), str(source / "tok512.bin"), "--output", str(tmp_path / "model")]
    monkeypatch.setattr(sys, "argv", ["import_llama2c.py", *arguments])
    assert importer.main() == 0
    return tmp_path / "model", source


@pytest.mark.real_data
def test_greedy_decoding_gives_the_published_text(stories):
    from transformers import AutoTokenizer

    directory, source = stories
    golden = json.loads((source / "golden.json").read_text())
    model, tokenizer = load_language_model(directory), AutoTokenizer.from_pretrained(directory)
    cache = model.new_cache(1, 256)
    ids, logits = [1], model.prefill(Ragged.build([[1]]), cache)
    while len(ids) < len(golden["greedy_ids_200"]):
        ids.append(int(logits.argmax(-1)))
        logits = model.decode(torch.tensor(ids[-1:]), cache)
    assert ids == golden["greedy_ids_200"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == golden["greedy_text"]
    assert tokenizer(golden["greedy_text"]).input_ids == ids


@pytest.mark.real_data
def test_loss_on_the_sample_stories(stories):
    """Five stories, blanks around them cut, one BOS each, no end token: 1.266 nats per token over all their tokens."""
    from transformers import AutoTokenizer

    directory, source = stories
    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts = [text.strip() for text in (source / "tinystories_sample.txt").read_text().split("<|endoftext|>")]
    rows = [tokenizer(text).input_ids for text in texts if text]
    assert len(rows) == 5 and all(row[0] == 1 and 1 not in row[1:] for row in rows)
    with torch.no_grad():
        loss = -load_language_model(directory)(batch=Ragged.build(rows)).log_probs.mean().item()
    assert loss == pytest.approx(1.266, abs=0.002)


@pytest.mark.real_data
def test_transformers_opens_it_with_equal_logits(stories):
    from transformers import AutoModelForCausalLM

    directory, _ = stories
    ids = torch.randint(3, 512, (2, 256), generator=torch.Generator().manual_seed(0))
    reference = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        assert_close(load_language_model(directory)(ids).logits, reference(ids).logits, atol=1e-4, rtol=0)


@pytest.mark.real_data
def test_the_tokenizer_merges_by_score_and_falls_back_to_bytes(stories):
    from transformers import AutoTokenizer

    directory, source = stories
    tokenizer = AutoTokenizer.from_pretrained(directory)
    pieces = import_llama2c.read_tokenizer(source / "tok512.bin", 512)
    sample = (source / "tinystories_sample.txt").read_text()
    for text in [*sample.split("\n"), " two  spaces ", "naïve — “quoted”, 日本 🙂", "\ttab", "aaaaaaa"]:
        if not text:
            continue
        assert tokenizer(text).input_ids == [1, *merged_by_score(text, pieces)]
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def merged_by_score(text: str, pieces: list[tuple[str, float]]) -> list[int]:
    """The reference rule: a space in front, characters or their bytes, then the best-scoring neighbors, one by one."""
    ids = {piece: number for number, (piece, _) in enumerate(pieces)}
    tokens: list[str] = []
    for character in ("▁" + text).replace(" ", "▁"):
        tokens += [character] if character in ids else [f"<0x{byte:02X}>" for byte in character.encode()]
    while True:
        pairs = [(pieces[ids[a + b]][1], -i) for i, (a, b) in enumerate(pairwise(tokens)) if a + b in ids]
        if not pairs:
            return [ids[token] for token in tokens]
        at = -max(pairs)[1]
        tokens[at : at + 2] = [tokens[at] + tokens[at + 1]]


def test_half_split_moves_rotary_pairs_apart():
    # one head of width 4: pairs (0, 1), (2, 3) become (0, 2), (1, 3)
    rows = torch.arange(8).view(8, 1)  # two heads
    assert import_llama2c.half_split(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_files_that_do_not_fit_are_refused(tmp_path, monkeypatch, capsys):
    path = tmp_path / "broken.bin"
    path.write_bytes(b"1234")
    with pytest.raises(UserError, match="too short"):
        import_llama2c.read_checkpoint(path)
    path.write_bytes(struct.pack("<7i", 8, 16, 1, 2, 2, 300, 4) + b"\0" * 40)
    with pytest.raises(UserError, match="40 bytes of weights"):
        import_llama2c.read_checkpoint(path)
    path.write_bytes(b"123456")
    with pytest.raises(UserError, match="token 0 of 3 is unreadable"):
        import_llama2c.read_tokenizer(path, 3)
    path.write_bytes(
        bytes(4) + b"".join(struct.pack("<fi", 0.0, len(name)) + name for name in (b"a", b"b", b"c", b"<0x00>"))
    )
    with pytest.raises(UserError, match="token 4 is not there, not byte 1"):
        import_llama2c.read_tokenizer(path, 4)
    monkeypatch.setattr(
        sys, "argv", ["import_llama2c.py", str(tmp_path / "none"), str(path), "--output", str(tmp_path / "out")]
    )
    assert importer.main() == 2
    assert "none" in capsys.readouterr().err
