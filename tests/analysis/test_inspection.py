"""`alignment inspect attention`: one page that needs nothing else, with the weights in it; and what is refused."""

import base64
import hashlib
import io
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from alignment import cli, load_model, load_tokenizer
from alignment.adapters import LoRASpec, attach, save_adapter
from alignment.analysis import attention_maps, encoder_decoder_attention_maps, write_attention
from alignment.analysis.inspection import encoded, load_any, pixels, shown
from alignment.data.tokenizers.tokenizer import save_tokenizer
from alignment.errors import UserError
from alignment.models.build import build_model
from alignment.models.huggingface.checkpoint import save_model

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
from parity_reference import read_cases  # noqa: E402

TEXT = "<b>ä cat & a \"dog\"</b> <script>alert('x')</script>"


class Page(HTMLParser):
    """Tags of a page, and the pictures, tokens and headings in it."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def named(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def heads(self):
        return [attrs for attrs in self.named("img") if attrs["alt"].startswith("layer")]


def weights_in(address: str) -> torch.Tensor:
    """A picture read back."""
    picture = Image.open(io.BytesIO(base64.b64decode(address.removeprefix("data:image/png;base64,"))))
    return ((255 - torch.tensor(np.asarray(picture))) / 255) ** 2


def test_page_holds_every_head_and_nothing_from_elsewhere(checkpoints, tmp_path, capsys):
    path = tmp_path / "maps.html"
    assert cli.main(["inspect", "attention", checkpoints["llama"], "--text", TEXT, "--output", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    assert not re.search(r"https?:|//[a-z]", re.sub('base64,[^"]+', "", html.split("<script>")[0])) and not page.named(
        "link"
    )
    assert all("src" not in attrs for attrs in page.named("script"))
    assert all(attrs["src"].startswith("data:") for attrs in page.named("img"))
    assert [attrs["alt"] for attrs in page.heads] == [f"layer {i}, head {j}" for i in range(2) for j in range(4)]
    ids = load_tokenizer(checkpoints["llama"])(TEXT)["input_ids"]
    maps = attention_maps(load_model(checkpoints["llama"]), ids)
    for number, attrs in enumerate(page.heads):
        layer, head = divmod(number, 4)
        drawn = weights_in(attrs["src"])
        assert torch.allclose(drawn.sqrt(), maps[layer][head].sqrt(), atol=0.5 / 255 + 1e-6)
        assert torch.equal(drawn == 0, maps[layer][head] < (0.5 / 255) ** 2)
    tokens = [attrs["title"] for attrs in page.named("li")]
    assert tokens == 2 * shown(load_tokenizer(checkpoints["llama"]), ids)  # both axes


def test_no_text_of_the_user_runs(checkpoints, tmp_path):
    html = write_attention(checkpoints["gpt2"], [TEXT], tmp_path / "maps.html").read_text(encoding="utf-8")
    assert "<script>alert" not in html and html.count("<script") == 1 and "<b>ä" not in html
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in html
    script = re.search(r"<script>(.*)</script>", html, re.DOTALL)[1]
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = [attrs["content"] for attrs in Page(html).named("meta") if "http-equiv" in attrs]
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{allowed}'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "a", "--layers", "1,x"], "error: --layers '1,x': give numbers from 0"),
        (["--text", "a", "--layers", "2"], "error: --layers 2: the model has layers 0 to 1 (self-attention), 2 in all"),
        (["--text", "a", "--target", "b"], "error: --target is for an encoder-decoder"),
        (["--text", "word " * 300, "--text", "b"], "error: --text 1 ('word word"),
    ],
)
def test_mistakes_are_one_message(checkpoints, tmp_path, capsys, options, message):
    path = tmp_path / "maps.html"
    assert cli.main(["inspect", "attention", checkpoints["gpt2"], *options, "--output", str(path)]) == 2
    assert message in capsys.readouterr().err
    assert not path.exists()


def test_all_texts_that_do_not_fit_are_named_at_once(checkpoints):
    tokenizer = load_tokenizer(checkpoints["gpt2"])
    with pytest.raises(UserError, match=r"--text 1 .* tokens, a page shows 128\n--text 3 .*128"):
        encoded(tokenizer, ["x y z " * 100, "short", "z y x " * 100], "--text")
    with pytest.raises(UserError, match="give at least one text"):
        encoded(tokenizer, [], "--text")


def test_reward_models_and_adapters_open_too(checkpoints, tmp_path):
    """The trunk is what is shown: the head may be any, and an adapter's change is in the maps."""
    tokenizer, config = load_tokenizer(checkpoints["gpt2"]), load_model(checkpoints["gpt2"]).config
    ids = tokenizer("a dog")["input_ids"]
    for task in ("scalar", "sequence"):
        model = build_model(config, task)
        save_model(model, tmp_path / task)
        for one, other in zip(
            attention_maps(load_any(str(tmp_path / task)), ids), attention_maps(model, ids), strict=True
        ):
            assert torch.equal(one, other)
    adapted = attach(load_model(checkpoints["gpt2"]), LoRASpec(rank=2, alpha=8.0))
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter += 0.2 * parameter.requires_grad
    save_adapter(adapted, tmp_path / "adapter", base=checkpoints["gpt2"])
    found, bare = load_any(str(tmp_path / "adapter")), load_model(checkpoints["gpt2"])
    for one, other, base in zip(*(attention_maps(each, ids) for each in (found, adapted, bare)), strict=True):
        assert torch.allclose(one, other, atol=1e-6) and not torch.allclose(one, base, atol=1e-3)


def tiny(family: str, tokenizer, directory: Path, task: str = "language") -> str:
    """A checkpoint of the family's first case with the tests' tokenizer."""
    case = next(iter(read_cases(family).values()))
    torch.manual_seed(0)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = {"model_type": case.model_type, **case.config, "vocab_size": len(tokenizer), **special}
    save_model(build_model(config, task), directory)
    save_tokenizer(tokenizer, directory)
    return str(directory)


@pytest.mark.parametrize("targets", [[], ["c d e"]], ids=["written", "given"])
def test_an_encoder_decoder_has_three_kinds(tokenizer, tmp_path, targets):
    directory = tiny("t5", tokenizer, tmp_path)
    html = write_attention(directory, ["a b"], tmp_path / "p.html", targets=targets).read_text(encoding="utf-8")
    for title in ("Encoder: self-attention", "Decoder: self-attention", "Decoder on encoder: cross-attention"):
        assert f"<h3>{title}</h3>" in html
    if not targets:
        return
    model, source = load_model(directory), tokenizer("a b")["input_ids"]
    target = [model.spec.start_token, *tokenizer("c d e")["input_ids"]]
    last = encoder_decoder_attention_maps(model, source, target).cross[-1][-1]
    drawn = weights_in(Page(html).heads[-1]["src"])
    assert drawn.shape == (len(target), len(source))
    assert torch.allclose(drawn.sqrt(), last.sqrt(), atol=0.5 / 255 + 1e-6)


def test_pixels_go_by_the_root_of_the_weight():
    # sqrt(0) = 0, sqrt(0.01) = 0.1 -> 25.5 -> 26 (to even), sqrt(0.25) = 0.5 -> 127.5 -> 128, sqrt(1) -> 255
    assert pixels(torch.tensor([[0.0, 0.01, 0.25, 1.0]])).tolist() == [[255, 229, 127, 0]]


def test_tokens_show_white_space_and_halves_of_letters():
    table = [(" a", "Ġa"), ("\n", "Ċ"), ("\N{REPLACEMENT CHARACTER}", "Ã"), ("the", "▁the"), ("", "<0xE2>"), (".", ".")]

    class Words:
        def decode(self, ids, clean_up_tokenization_spaces):
            assert not clean_up_tokenization_spaces
            return table[ids[0]][0]

        def convert_ids_to_tokens(self, ids):
            return [table[i][1] for i in ids]

    assert shown(Words(), range(6)) == ["␣a", "⏎", "Ã", "▁the", "<0xE2>", "."]
