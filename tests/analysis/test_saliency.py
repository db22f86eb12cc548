"""Attributions: by hand, complete on random models, captum's; parts left out; the answers of every kind of model; the page."""

import json
from functools import partial

import pytest
import torch
from captum.attr import InputXGradient, IntegratedGradients
from torch.testing import assert_close

from alignment import cli, load_model, load_reward_model, load_tokenizer
from alignment.adapters import PromptSpec, attach
from alignment.analysis import gradient_times_input, integrated_gradients
from alignment.analysis.saliency import (
    explain_answer,
    explained_class,
    explained_continuation,
    explained_score,
    load_explained,
    token_tables,
    without_each,
)
from alignment.data.text.chat import prompt_ids
from alignment.data.text.templates import with_chat_template
from alignment.data.tokenizers.tokenizer import save_tokenizer
from alignment.data.tokenizers.train import train_wordpiece
from alignment.errors import UserError
from alignment.models.build import build_model
from alignment.models.external.load import load_external
from alignment.models.huggingface.checkpoint import save_model
from tests.analysis.test_inspection import Page, tiny
from tests.conftest import roughen, write_lines

TEXT, TARGET = "We loved the pool and the spa", " of this hotel"


# By hand


def test_a_linear_model_has_its_own_terms():
    """value = sum_te w_te x_te + 3: token t adds sum_e w_te x_te, from a baseline b sum_e w_te (x_te - b_te)."""
    torch.manual_seed(0)
    weight, x, start = (torch.randn(5, 3) for _ in range(3))

    def value(vectors):
        return (weight * vectors).sum((1, 2)) + 3

    assert_close(gradient_times_input(value, x), (weight * x).sum(-1), atol=1e-6, rtol=0)
    for baseline in (torch.zeros(5, 3), start):
        found = integrated_gradients(value, x, baseline)
        assert_close(found.values.float(), (weight * (x - baseline)).sum(-1), atol=1e-6, rtol=0)
        assert abs(found.residual) < 1e-5 and found.gradients == 32
        assert found.value == pytest.approx(value(x[None]).item()) and found.baseline_value == pytest.approx(
            value(baseline[None]).item()
        )


def test_a_product_is_shared_and_a_cube_is_exact():
    # f = x y from (0, 0): the gradient on the path a (x, y) is a (y, x), its mean half of it: x y / 2 each; 2 * 3 / 2 = 3
    found = integrated_gradients(lambda v: v[:, 0, 0] * v[:, 1, 0], torch.tensor([[2.0], [3.0]]), torch.zeros(2, 1))
    assert_close(found.values.float(), torch.tensor([3.0, 3.0]))
    # gradient x input of it: x dy and y dx are x y = 6 each
    assert gradient_times_input(lambda v: v[:, 0, 0] * v[:, 1, 0], torch.tensor([[2.0], [3.0]])).tolist() == [6, 6]


def test_steep_places_get_points_until_the_sum_is_right():
    """A step of width 1/1000 at 0.3 of the way: 32 points miss it."""

    def value(vectors):
        return 5 * torch.sigmoid(1000 * (vectors[:, 0, 0] - 0.3))

    x, baseline = torch.tensor([[1.0]]), torch.zeros(1, 1)
    found = integrated_gradients(value, x, baseline)
    assert found.complete and found.values.item() == pytest.approx(5, abs=0.05) and found.gradients > 32
    short = integrated_gradients(value, x, baseline, max_gradients=32)
    assert not short.complete and short.gradients < 64
    assert short.residual == pytest.approx(short.values.item() - 5, abs=1e-3)


# Models


def answer_of(kind, checkpoints, tokenizer):
    if kind != "bert":
        return explained_continuation(load_model(checkpoints[kind]), load_tokenizer(checkpoints[kind]), TEXT, TARGET)
    torch.manual_seed(1)
    config = {"model_type": "bert", "vocab_size": len(tokenizer), "num_labels": 3, "max_position_embeddings": 64}
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = build_model(config | shape, "sequence")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return explained_class(model, tokenizer, TEXT, None)


@pytest.mark.parametrize("baseline", ["zero", "a"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_integrated_gradients_are_complete(kind, baseline, checkpoints, tokenizer):
    answer = answer_of(kind, checkpoints, tokenizer)
    found = explain_answer(answer, TEXT, baseline=baseline)["integrated_gradients"]
    total = sum(value for value in found["values"] if value is not None)
    assert found["complete"] and abs(total - found["change"]) <= 0.01 * abs(found["change"])
    assert found["residual"] == pytest.approx(total - found["change"], abs=1e-5)
    assert found["change"] + found["baseline_value"] == pytest.approx(answer.values([TEXT])[0], abs=1e-4)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_an_answer_that_is_not_finite_is_not_explained(kind, checkpoints, tokenizer):
    answer = answer_of(kind, checkpoints, tokenizer)
    next(answer.model.parameters()).data.fill_(torch.nan)
    with pytest.raises(UserError, match="not finite"):
        explain_answer(answer, TEXT)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_both_are_captums(kind, checkpoints, tokenizer):
    answer = answer_of(kind, checkpoints, tokenizer)
    document, [table] = answer.encode(TEXT), token_tables(answer.model)
    x, value = table(torch.tensor(document.ids)).detach(), partial(answer.value_at, document)
    assert value(x[None]).item() == pytest.approx(answer.values([TEXT])[0], abs=1e-5)
    theirs = InputXGradient(value).attribute(x[None].clone().requires_grad_())[0].sum(-1)
    assert_close(gradient_times_input(value, x), theirs.detach(), atol=1e-5, rtol=1e-4)
    start = table(torch.tensor([9] * len(x))).detach()
    theirs = IntegratedGradients(value).attribute(x[None], start[None], n_steps=64)[0].sum(-1)
    ours = integrated_gradients(value, x, start, tolerance=1e-3).values.float()
    assert_close(ours, theirs.float(), atol=5e-3 * theirs.abs().max().item(), rtol=0)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # transformers' GPT-2 adds a vector of the sentence, if it gets any
def test_foreign_classes_and_soft_prompts_give_the_same(kind, checkpoints):
    """transformers' class of the same weights; and with vectors in front of the text, which are no token of it."""
    tokenizer = load_tokenizer(checkpoints[kind])
    models = load_model(checkpoints[kind]), load_external(checkpoints[kind])
    for prompted in (False, True):
        if prompted:
            torch.manual_seed(0)
            first, second = (attach(model, PromptSpec(tokens=3)) for model in models)
            second.soft_prompt.load_state_dict(first.soft_prompt.state_dict())
        one, other = (explain_answer(explained_continuation(model, tokenizer, TEXT, TARGET), TEXT) for model in models)
        assert one["value"] == pytest.approx(other["value"], abs=1e-4)
        for key in ("values",):
            pairs = zip(one["integrated_gradients"][key], other["integrated_gradients"][key], strict=True)
            assert all(a == b or a == pytest.approx(b, abs=1e-3) for a, b in pairs)
        assert [x is None for x in one["gradient_x_input"]] == [x is None for x in other["gradient_x_input"]]


def test_target_and_special_tokens_stay(checkpoints):
    answer = answer_of("llama", checkpoints, None)
    found = explain_answer(answer, TEXT)
    assert answer.target > 1 and found["target_tokens"] == answer.target
    held = [value is None for value in found["gradient_x_input"]]
    assert held[-answer.target :] == [True] * answer.target and held.count(True) == answer.target + sum(
        id in answer.tokenizer.all_special_ids for id in answer.encode(TEXT).ids
    )


def test_the_answer_is_what_the_model_says(checkpoints, tokenizer):
    """The sum of the target's log-probabilities; without a target the most probable next token."""
    model, tokens = load_model(checkpoints["gpt2"]), load_tokenizer(checkpoints["gpt2"])
    text, target = prompt_ids(tokens, TEXT), tokens(TARGET, add_special_tokens=False)["input_ids"]
    log_probs = model(torch.tensor([text + target])).logits[0].log_softmax(-1)
    expected = sum(log_probs[len(text) + i - 1, token] for i, token in enumerate(target)).item()
    assert explained_continuation(model, tokens, TEXT, TARGET).values([TEXT]) == [pytest.approx(expected, abs=1e-5)]
    greedy = explained_continuation(model, tokens, TEXT, None)
    assert greedy.values([TEXT])[0] == pytest.approx(log_probs[len(text) - 1].max().item(), abs=1e-5)
    answer = answer_of("bert", checkpoints, tokenizer)
    logits = answer.model(torch.tensor([tokenizer(TEXT)["input_ids"]])).logits[0].log_softmax(-1)
    assert answer.values([TEXT])[0] == pytest.approx(logits.max().item(), abs=1e-5)
    other = explained_class(answer.model, tokenizer, TEXT, "LABEL_0")
    assert other.values([TEXT])[0] == pytest.approx(logits[0].item(), abs=1e-5)
    with pytest.raises(UserError, match="--target is one of LABEL_0, LABEL_1, LABEL_2"):
        explained_class(answer.model, tokenizer, TEXT, "joy")


def test_a_reward_models_score_is_explained(stage):
    directory = str(stage("reward") / "model")
    reward_model = load_reward_model(directory)
    answer = explained_score(reward_model, TEXT, " The pool is warm.")
    assert answer.values([TEXT])[0] == pytest.approx(
        reward_model.score([(TEXT, " The pool is warm.")]).item(), abs=1e-5
    )
    whole = load_explained(directory)(TEXT, None)
    assert whole.name == "score" and whole.values([TEXT])[0] == pytest.approx(
        reward_model.score([TEXT]).item(), abs=1e-5
    )
    assert explain_answer(answer, TEXT)["integrated_gradients"]["complete"]
    with pytest.raises(UserError, match="give --target"):
        explained_score(reward_model, [{"role": "user", "content": "Hi"}], None)


def test_an_encoders_score_of_a_pair_is_explained(tmp_path):
    """Both texts of the pair are told apart, and its special tokens stay."""
    tokenizer = train_wordpiece(["is it warm", "the pool is warm", "no"] * 4, 60)
    config = {"model_type": "bert", "vocab_size": len(tokenizer), "max_position_embeddings": 32, "hidden_size": 16}
    torch.manual_seed(0)
    model = build_model(config | {"intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}, "scalar")
    save_model(roughen(model, size=0.3), tmp_path)
    save_tokenizer(tokenizer, tmp_path)
    explained = load_explained(str(tmp_path))("is it warm", "the pool is warm")
    expected = load_reward_model(str(tmp_path)).score([("is it warm", "the pool is warm")]).item()
    found = explain_answer(explained, "is it warm")
    assert found["value"] == pytest.approx(expected, abs=1e-5) and found["integrated_gradients"]["complete"]
    held = [token for token, value in zip(found["tokens"], found["gradient_x_input"], strict=True) if value is None]
    assert held == ["[CLS]", "[SEP]", "[SEP]"] and found["ablation"]["parts"] == ["is", "it", "warm"]


def test_messages_go_through_the_chat_template(checkpoints):
    tokenizer = with_chat_template(load_tokenizer(checkpoints["llama"]), "zephyr")
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Is it warm?"},
    ]
    explained = explained_continuation(load_model(checkpoints["llama"]), tokenizer, messages, " yes")
    found = explain_answer(explained, messages, unit="turn")
    silent = explained.values([[messages[0], {"role": "assistant", "content": ""}, messages[2]]])[0]
    assert found["ablation"]["parts"][1] == "assistant: Yes?" and found["ablation"]["values"][1] == pytest.approx(
        silent, abs=1e-5
    )
    assert len(found["tokens"]) == len(prompt_ids(tokenizer, messages)) + explained.target


# Parts left out


def test_parts_are_left_out_one_at_a_time():
    assert without_each("A b, c.", "word") == [("A", "b, c."), ("b,", "A c."), ("c.", "A b,")]
    sentences = "It is 3.5 m. Is it? Yes!"
    assert without_each(sentences, "sentence") == [
        ("It is 3.5 m.", "Is it? Yes!"), ("Is it?", "It is 3.5 m. Yes!"), ("Yes!", "It is 3.5 m. Is it?")
    ]  # fmt: skip
    # [B-L8] no blank follows these
    chinese = without_each("\u4f60\u597d\u3002\u300c\u662f\uff1f\u300d\u6211\u53bb\uff01", "sentence")
    assert [part for part, _ in chinese] == ["\u4f60\u597d\u3002", "\u300c\u662f\uff1f\u300d", "\u6211\u53bb\uff01"]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "a b"},
    ]
    empty = [without for _, without in without_each(messages, "turn")]
    assert [[one["content"] for one in each] for each in empty] == [
        ["", "Yes?", "a b"],
        ["Hi", "", "a b"],
        ["Hi", "Yes?", ""],
    ]
    words = without_each(messages, "word")
    assert [(part, without[-1]["content"]) for part, without in words] == [("a", "b"), ("b", "a")]
    assert all(without[:-1] == messages[:-1] for _, without in words) and messages[0]["content"] == "Hi"
    with pytest.raises(UserError, match="--drop turn is for messages"):
        without_each("Hi", "turn")


def test_changes_are_those_of_the_text_without_the_part(checkpoints):
    answer = answer_of("llama", checkpoints, None)
    found = explain_answer(answer, TEXT)
    [*words] = TEXT.split()
    assert found["ablation"]["parts"] == words
    for i, (value, change) in enumerate(zip(found["ablation"]["values"], found["ablation"]["changes"], strict=True)):
        alone = answer.values([" ".join(words[:i] + words[i + 1 :])])[0]
        assert value == pytest.approx(alone, abs=1e-4) and change == pytest.approx(found["value"] - value, abs=1e-6)
    assert explain_answer(answer, "We")["ablation"]["changes"] == []


# The command


def test_the_command_writes_a_page_and_numbers(checkpoints, tmp_path, capsys):
    path, rows = tmp_path / "page.html", tmp_path / "prompts.jsonl"
    texts = ["<b>Hello</b> there. Who?", "The bar"]
    write_lines(rows, ({"prompt": text} for text in texts))
    given = ["--prompts", str(rows), "--target", " yes", "--drop", "sentence", "--output", str(path)]
    assert cli.main(["inspect", "saliency", checkpoints["llama"], *given]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    found = json.loads(path.with_suffix(".json").read_text())["texts"]
    assert [one["prompt"] for one in found] == texts and found[0]["ablation"]["parts"] == [
        "<b>Hello</b> there.",
        "Who?",
    ]
    html = path.read_text()
    assert "<b>Hello" not in html and "<script" not in html and "There is one sentence only" in html
    drawn = [attrs for attrs in Page(html).named("span") if "style" in attrs]
    assert len(drawn) == 2 + 2 + sum(value is not None for one in found for value in one["gradient_x_input"]) * 2


def test_mistakes_are_told(checkpoints, tokenizer, tmp_path, capsys):
    start = ["inspect", "saliency", checkpoints["llama"], "--output", str(tmp_path / "page.html")]
    for more, message in (
        ([], "0 prompts and 0 --target"),
        (["--text", "a", "--text", "b", "--text", "c", "--target", "d", "--target", "e"], "3 prompts and 2 --target"),
        (["--text", "a b", "--drop", "turn"], "--drop turn is for messages"),
        (["--text", "a b", "--baseline", "[NOTHING]"], "--baseline '[NOTHING]': give zero, or a token"),
        (["--text", "a b", "--target", ""], "--target '' has no token"),
        (["--text", "a " * 400, "--target", "b"], "do not fit the model's 320 positions"),
    ):
        assert cli.main([*start, *more]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["inspect", "saliency", tiny("t5", tokenizer, tmp_path / "t5"), "--text", "a"]) == 2
    assert "this is an encoder-decoder" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_a_classifiers_directory_opens(tokenizer, tmp_path):
    names = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}, "num_labels": 2}
    config = {
        "model_type": "gpt2",
        "vocab_size": len(tokenizer),
        "n_positions": 64,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
    }
    model = build_model({**config, **names, "pad_token_id": tokenizer.pad_token_id}, "sequence")
    save_model(model, tmp_path)
    save_tokenizer(tokenizer, tmp_path)
    answer = load_explained(str(tmp_path))(TEXT, "good")
    expected = model(torch.tensor([tokenizer(TEXT)["input_ids"]])).logits[0].log_softmax(-1)[1].item()
    assert answer.name == "log-probability of class good, nats" and answer.values([TEXT])[0] == pytest.approx(
        expected, abs=1e-5
    )
