"""The ablation table: every row trains, differs from the baseline in the part it names, and is counted as it should be."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))  # the script imports its neighbor by its bare name
import ablate  # noqa: E402
import ablate_efficient as efficient  # noqa: E402
import ablate_parts as parts  # noqa: E402
from ablate import ROWS, vanilla  # noqa: E402

from alignment.models.layers.attention import AttentionContext  # noqa: E402

WORDS = ("to be or not to be, that is the question: whether 'tis nobler in the mind to suffer " * 30).strip()
SMALL = ablate.Settings(steps=2, seeds=1, width=64, layers=2, batch=2, tokens=16)
BASE = vanilla(65, 64, 4, 32)


def no_attention(*_):
    raise AssertionError("a part with an arithmetic of its own calls no attention")


@pytest.fixture(scope="module")
def corpus():
    return ablate.corpus_of(WORDS, SMALL.tokens)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_trains(row, corpus):
    result = ablate.measure(row, corpus, SMALL)
    values = (result.steps_per_second, result.early_loss, result.final_loss)
    assert all(len(each) == 1 and math.isfinite(each[0]) and each[0] > 0 for each in values)
    assert result.parameters > 0 and (result.operations_per_token or 1) > 0
    # Two steps at a rate that warms up: the loss is still near that of guessing.
    assert result.final_loss[0] == pytest.approx(math.log(corpus.vocabulary), rel=0.35)


def test_training_learns(corpus):
    settings = ablate.Settings(steps=60, seeds=1, width=64, layers=2, batch=4, tokens=16)
    _, early, final = ablate.train(
        ablate.build(vanilla(corpus.vocabulary, 64, 2, 16), seed=0), corpus, settings, seed=0
    )
    assert final < early < math.log(corpus.vocabulary)


def parameters(name: str) -> int:
    return sum(each.numel() for each in ablate.build(ROWS[name][1](BASE), seed=0).parameters())


@pytest.mark.parametrize("name", ["glu", "reglu", "geglu", "swiglu", "liglu", "deeper", "shallower"])
def test_rows_of_equal_size(name):
    assert parameters(name) == pytest.approx(parameters("vanilla"), rel=0.02)


def test_sizes_by_hand():
    block = 4 * (64 * 64 + 64) + (64 * 256 + 256) + (256 * 64 + 64) + 4 * 64
    assert parameters("vanilla") == 65 * 64 + 32 * 64 + 4 * block + 2 * 64
    assert parameters("untied") == parameters("vanilla") + 65 * 64
    assert parameters("shared") == parameters("vanilla") - 3 * block
    assert parameters("factorised") == parameters("vanilla") - 65 * 48 + 2 * 16 * 64
    assert parameters("multi-query") == parameters("vanilla") - 4 * 2 * 48 * 65  # one key head of 16 for four
    assert parameters("alibi") == parameters("vanilla") - 32 * 64
    assert (
        parameters("switch") == parameters("moe") == parameters("vanilla") + 4 * (3 * (block - 4 * 64 * 65 - 256) + 256)
    )


def test_every_row_sees_the_same_windows(corpus):
    first, again = (list(ablate.batches(corpus.training, SMALL, seed=1)) for _ in range(2))
    other = list(ablate.batches(corpus.training, SMALL, seed=2))
    assert [batch.tokens.tolist() for batch in first] == [batch.tokens.tolist() for batch in again]
    assert [batch.tokens.tolist() for batch in first] != [batch.tokens.tolist() for batch in other]
    assert all(batch.lengths == (16, 16) for batch in first)


def test_the_last_tenth_is_held_out():
    text = "ab" * 450 + "cd" * 50
    corpus = ablate.corpus_of(text, 16)
    assert corpus.vocabulary == 4
    assert set(corpus.training.tolist()) == {0, 1} and len(corpus.training) == 900
    assert len(corpus.held_out) == 6 and all(row == [2, 3] * 8 for row in corpus.held_out)  # 100 // 16


def test_held_out_loss_is_the_mean_over_predicted_characters(corpus):
    model = ablate.build(vanilla(corpus.vocabulary, 64, 2, 16), seed=0)
    rows = torch.tensor(corpus.held_out)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    assert ablate.held_out_loss(model, corpus, SMALL) == pytest.approx(expected.item(), rel=1e-6)


def test_command_line_writes_both_files(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text(WORDS, encoding="utf-8")
    words = ["--rows", "vanilla", "switch", "--steps", "2", "--seeds", "2", "--width", "32", "--layers", "2"]
    more = ["--batch", "2", "--tokens", "16", "--device", "cpu", "--text", str(tmp_path / "text.txt")]
    monkeypatch.setattr(sys, "argv", ["ablate.py", *words, *more, "--output", str(tmp_path / "out")])
    ablate.main()
    written = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert [row["name"] for row in written["rows"]] == ["vanilla", "switch"]
    loss = written["rows"][0]["final_loss"]
    assert len(loss["seeds"]) == 2 and loss["mean"] == pytest.approx(sum(loss["seeds"]) / 2)
    assert loss["std"] == pytest.approx(abs(loss["seeds"][0] - loss["seeds"][1]) / 2**0.5)
    assert written["settings"]["steps"] == 2 and written["settings"]["optim"]["weight_decay"] == 0.1
    markdown = (tmp_path / "out" / "ablation.md").read_text()
    assert len(markdown.splitlines()) == 4 and "| Switch (1 of 4) |" in markdown
    assert markdown in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--layers", "3"], ["--width", "36"], ["--rows", "nothing"], ["--table", "efficient", "--rows", "rope"]]
)
def test_wrong_options_are_refused(words, monkeypatch, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(WORDS, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["ablate.py", "--text", str(tmp_path / "text.txt"), *words])
    with pytest.raises(SystemExit) as stopped:
        ablate.main()
    assert stopped.value.code == 2
    assert words[-1] in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.finish is not None])
def test_a_part_of_the_script_sees_no_later_token(name):
    spec = ROWS[name].change(vanilla(20, 64, 2, 16))
    model = ablate.build(spec, 0, ROWS[name].finish)
    rows = torch.randint(20, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = torch.cat([rows[:, :10], (rows[:, 10:] + 1) % 20], dim=1)
    with torch.no_grad():
        first, second = model(rows).logits, model(changed).logits
    torch.testing.assert_close(first[:, :10], second[:, :10])
    assert not torch.allclose(first[:, 10:], second[:, 10:])


def test_parts_by_hand():
    head = torch.nn.Linear(3, 5, bias=False)
    mixture = parts.SoftmaxMixtureHead(head, 2)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    states = mixture.project(x).tanh().view(4, 2, 3)
    expected = (mixture.share(x).softmax(-1)[..., None] * head(states).softmax(-1)).sum(1)
    torch.testing.assert_close(mixture(x).exp(), expected)
    lightweight = parts.CausalConvolution(4, heads=2, kernel=3, tokens=5, dynamic=False)
    torch.nn.init.eye_(lightweight.output.weight)
    values = torch.nn.functional.glu(lightweight.enter(torch.ones(5, 4)))
    seen = torch.tensor([1.0, 2.0, 3.0, 3.0, 3.0])[:, None] / 3  # equal weights on three tokens, zeros before the text
    torch.testing.assert_close(lightweight(torch.ones(5, 4), AttentionContext(attend=no_attention)), seen * values)


def test_a_memory_takes_the_best_of_all_pairs():
    memory = parts.ProductKeys(8, heads=1, count=3, top=2).eval()
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    query = memory.norm(memory.query(x)).view(6, 2, 2)
    scores = query[:, 0] @ memory.keys[0, 0].T, query[:, 1] @ memory.keys[1, 0].T
    best, index = (scores[0][:, :, None] + scores[1][:, None]).flatten(1).topk(2)
    expected = (best.softmax(-1)[..., None] * memory.values.weight[index]).sum(1)
    torch.testing.assert_close(memory(x), expected)


@pytest.mark.parametrize(
    ("values", "baseline", "shown"),
    [([2.0, 2.2], [1.9, 2.1], "(+0.1000)"), ([2.0, 2.2], [1.0, 1.2], "+1.0000"), ([2.0], [1.9], "+0.1000")],
)
def test_differences_within_the_spread_are_in_brackets(values, baseline, shown):
    assert ablate.difference(values, baseline) == shown


def test_the_second_table_has_its_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(efficient, "LENGTHS", (32, 64))
    settings = ablate.Settings(steps=2, seeds=2, width=32, layers=1, batch=2, tokens=24)
    efficient.run(["full", "unfused", "lsh"], settings, tmp_path)
    written = json.loads((tmp_path / "efficient.json").read_text())
    assert [len(row["loss"]) for row in written["rows"]] == [2, 0, 2]
    assert all(min(*row["seconds"], *row["megabytes"]) > 0 for row in written["rows"])
    assert "| seconds, 32 / 64 tokens |" in (tmp_path / "efficient.md").read_text()


@pytest.mark.parametrize("name", ablate.TABLES["efficient"])
def test_both_files_name_the_rows_of_the_second_table(name):
    assert name in efficient.PARTS and len(efficient.PARTS) == len(ablate.TABLES["efficient"])


def test_exponents_by_hand():
    assert efficient.exponent((1, 2, 4), (3.0, 12.0, 48.0)) == pytest.approx(2)
    assert efficient.exponent((1, 2, 4), (5.0, 5.0, 5.0)) == pytest.approx(0, abs=1e-12)


def test_scores_in_memory_grow_with_the_square():
    megabytes = [efficient.cost(efficient.PARTS["unfused"], 32, length)[1] for length in (512, 1024)]
    assert megabytes[1] / megabytes[0] == pytest.approx(4, rel=0.15)


def test_the_last_tokens_are_to_be_the_first_ones():
    batch = efficient.recall(SMALL, 3, torch.Generator().manual_seed(0))
    rows = batch.tokens.view(3, SMALL.tokens)
    assert batch.labels.tolist() == rows[:, :8].flatten().tolist()
    assert (rows[:, -8:] == efficient.VOCABULARY).all() and (rows[:, :-8] < efficient.VOCABULARY).all()
    assert batch.target_index.tolist() == [*range(8, 16), *range(24, 32), *range(40, 48)]
