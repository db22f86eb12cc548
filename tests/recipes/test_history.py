"""The recipe's systems: their attention by hand, their limits, and every stage at toy size."""

import json
import math
from random import Random
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from alignment.config.load import packaged_folder
from alignment.pipeline.recipe import read_recipe
from alignment.pipeline.stages import find_stage, load_stage_file

FOLDER = packaged_folder("recipes") / "history"


def page(name) -> Any:
    return load_stage_file(FOLDER / f"{name}.py")


pairs, translation, bahdanau, convs2s = map(page, ("pairs", "translation", "bahdanau", "convs2s"))
elmo, ulmfit, reviews, aspects = map(page, ("elmo", "ulmfit", "reviews", "aspects"))
SOURCE = torch.tensor([[5, 6, 7, 2], [8, 2, 0, 0]])  # of 3 letters and of 1
BEFORE = torch.tensor([[1, 9, 10], [1, 11, 0]])


def filled(module, **weights):
    """The module with these matrices."""
    with torch.no_grad():
        for name, value in weights.items():
            parameter = module.get_parameter(name.replace("__", "."))
            parameter.copy_(torch.tensor(value).expand_as(parameter))
    return module


def test_additive_attention_by_hand():
    attention = filled(
        bahdanau.AdditiveAttention(1, 1, 1), of_state__weight=1.0, of_annotation__weight=1.0, score__weight=2.0
    )
    annotations = torch.tensor([[[0.0], [math.atanh(0.5)], [9.0]]])
    mask = torch.tensor([[True, True, False]])
    # energies 2 tanh(0 + 0) = 0 and 2 tanh(atanh(0.5)) = 1, so the second weight is e / (1 + e)
    context, weights = attention(torch.zeros(1, 1), annotations, attention.of_annotation(annotations), mask)
    second = math.e / (1 + math.e)
    assert_close(weights, torch.tensor([[1 - second, second, 0.0]]))
    assert_close(context, torch.tensor([[second * math.atanh(0.5)]]))


def test_multi_step_attention_by_hand():
    attention = filled(convs2s.Attention(1), query__weight=0.0, query__bias=0.0)
    g, z, e = torch.full((1, 1, 1), math.sqrt(2)), torch.tensor([[[0.0], [1.0]]]), torch.tensor([[[0.0], [3.0]]])
    # d = sqrt(2) * sqrt(1/2) = 1, scores 0 and 1; z + e is 4 at the second place, times sqrt(1/2) and sqrt(2 places) is 4
    context, weights = attention(torch.zeros(1, 1, 1), g, z, e, torch.tensor([[True, True]]))
    second = math.e / (1 + math.e)
    assert_close(weights, torch.tensor([[[1 - second, second]]]))
    assert_close(context, torch.tensor([[[4 * second]]]))


@pytest.mark.parametrize("build", [bahdanau.Bahdanau, convs2s.ConvS2S, page("transformer").Translator])
def test_translators_see_no_padding_and_nothing_ahead(build):
    torch.manual_seed(0)
    model = build(pairs.VOCABULARY, 8).eval()
    logits, alignment = model(SOURCE, BEFORE)
    alone, _ = model(SOURCE[1:, :2], BEFORE[1:, :2])
    assert_close(logits[1:, :2], alone)
    other, _ = model(SOURCE, torch.tensor([[1, 9, 12], [1, 12, 0]]))
    assert_close(other[0, :2], logits[0, :2])
    assert not torch.allclose(other[0, 2], logits[0, 2])
    if alignment is not None:
        assert_close(alignment.sum(-1), torch.ones(2, 3))
        assert (alignment[1, :, 2:] == 0).all()


def test_pairs_by_hand_and_held_out_sources_apart():
    assert pairs.rewrite("copy", [5, 9, 4]) == ([5, 9, 4], [0, 1, 2])
    assert pairs.rewrite("reversal", [5, 9, 4]) == ([4, 9, 5], [2, 1, 0])
    written, origin = pairs.rewrite("transliteration", [5, 9])  # 5 is a vowel
    first, second = pairs.RULES[5, False], pairs.RULES[9, True]
    assert written == first + second and origin == [0] * len(first) + [1] * len(second)
    found = [
        {tuple(row) for row in pairs.sample_pairs(Random(1), "copy", (2, 2), 300, held_out=part).source.tolist()}
        for part in (False, True)
    ]
    assert not found[0] & found[1]


def test_alignment_share_of_a_perfect_and_of_a_uniform_map():
    batch = pairs.sample_pairs(Random(0), "reversal", (5, 5), 4, held_out=False)
    perfect = torch.nn.functional.one_hot(batch.origin.clamp(min=0), 6).float()
    shares = translation.alignment_shares(perfect, batch)
    # of 6 places (the end is one) 3 are near inner letters and the last, whose neighbor is the end, 2 near the first
    assert shares["alignment_share"] == 1
    assert shares["uniform_share"] == pytest.approx((2 + 4 * 3) / 30)
    assert translation.alignment_shares(torch.full((4, 6, 6), 1 / 6), batch)["alignment_share"] == pytest.approx(
        14 / 30
    )


def test_the_scalar_mix_by_hand():
    mix = filled(elmo.ScalarMix(2), weights=[0.0, math.log(3)], gamma=2.0)  # shares 1/4 and 3/4
    assert_close(mix([torch.full((1, 1, 1), 4.0), torch.full((1, 1, 1), 8.0)]), torch.full((1, 1, 1), 14.0))


def test_each_direction_of_the_bilm_reads_its_side_alone():
    torch.manual_seed(0)
    model = elmo.BiLM(20, 4).eval()
    tokens = torch.tensor([[2, 5, 6, 7, 3, 0, 0], [2, 5, 6, 7, 8, 9, 3]])
    ahead, back = model(tokens)[2].chunk(2, -1)
    other_ahead, other_back = model(torch.tensor([[2, 5, 6, 9, 3, 0, 0], [2, 5, 6, 7, 8, 9, 3]]))[2].chunk(2, -1)
    assert_close(ahead[0, :3], other_ahead[0, :3])
    assert_close(back[0, 4], other_back[0, 4])
    assert not torch.allclose(back[0, 2], other_back[0, 2])
    assert_close(model(tokens[:1, :5])[2], model(tokens)[2][:1, :5])  # padding changes nothing


def test_the_slanted_triangle_and_the_layers_rates():
    assert ulmfit.slanted_triangular(0) == 1 / 32
    assert ulmfit.slanted_triangular(0.1) == 1
    assert ulmfit.slanted_triangular(0.55) == pytest.approx((1 + 31 / 2) / 32)
    layers = [torch.nn.Linear(1, 1) for _ in range(3)]
    rates = [group["lr"] for group in ulmfit.discriminative_rates(layers, 2.6**2)]
    assert rates == pytest.approx([1, 2.6, 2.6**2])
    ulmfit.unfreeze_to(layers, 1)
    assert [layer.weight.requires_grad for layer in layers] == [False, True, True]


def test_concat_pooling_leaves_padding_out():
    states = torch.tensor([[[1.0], [5.0], [99.0]]])
    assert ulmfit.concat_pooling(states, torch.tensor([[True, True, False]])).tolist() == [[5, 5, 3]]


def test_attention_pooling_by_hand():
    pooling = filled(aspects.AttentionPooling(1, 2), inner__weight=1.0, maps__weight=[[0.0], [2.0]])
    states = torch.tensor([[[0.0], [math.atanh(0.5)], [7.0]]])
    vectors, maps = pooling(states, torch.tensor([[True, True, False]]))
    second = math.e / (1 + math.e)  # of the scores 2 * 0 and 2 * 0.5
    assert_close(maps, torch.tensor([[[0.5, 0.5, 0.0], [1 - second, second, 0.0]]]))
    assert_close(vectors[0, 1], torch.tensor([second * math.atanh(0.5)]))


def test_opinions_stand_where_the_review_says():
    for seed in range(30):
        review = reviews.write_review(Random(seed), verdict=0.5)
        for topic, (polarity, first, end) in review.opinions.items():
            sentence = review.words[first:end]
            good = any(word in reviews.GOOD for word in sentence) != ("not" in sentence)
            assert topic in sentence and sentence[-1] == "." and good == bool(polarity)
        assert review.label == (sum(polarity for polarity, _, _ in review.opinions.values()) >= 2)


def test_the_recipes_systems_have_equal_parameters():
    widths = {
        stage.name: stage.config["width"] for stage in read_recipe("history")[0].stages if "width" in stage.config
    }
    classification, transformer = page("classification"), page("transformer")
    words = classification.build_corpus(classification.ClassificationConfig("", 1)).vocabulary
    language_models = [
        elmo.ElmoClassifier(words, 2, widths["elmo"], elmo.BiLM(words, widths["elmo"])),
        ulmfit.PoolingClassifier(ulmfit.LSTMLanguageModel(words, widths["ulmfit"]), 2),
        *(transformer.Reader(words, widths[kind], kind) for kind in ("decoder", "encoder")),
    ]
    translators = [
        build(pairs.VOCABULARY, widths[name])
        for name, build in (
            ("bahdanau", bahdanau.Bahdanau), ("convs2s", convs2s.ConvS2S), ("translator", transformer.Translator),
        )
    ]  # fmt: skip
    for models in (translators, language_models):
        counts = [page("descent").parameter_count(model) for model in models]
        assert max(counts) < 1.07 * min(counts), counts


TOY = {
    "translation": {"steps": 3, "held_out": 6, "batch_size": 4, "tasks": ["copy"]},
    "classification": {"general": 40, "unlabeled": 40, "labeled": 16, "held_out": 8, "general_steps": 2,
                       "review_steps": 2, "steps": 10, "batch_size": 4},
    "aspects": {"held_out": 8, "steps": 3, "batch_size": 4},
}  # fmt: skip


@pytest.mark.parametrize("stage", read_recipe("history")[0].stages, ids=lambda stage: stage.name)
def test_every_stage_runs_at_toy_size(stage, tmp_path):
    config_class, run = find_stage(stage.run, FOLDER)
    kind = {"TranslationConfig": "translation", "ClassificationConfig": "classification", "AspectsConfig": "aspects"}
    results = json.loads(
        run(config_class(output=str(tmp_path), width=8, **TOY[kind[config_class.__name__]])).read_text()
    )
    found = results.get("tasks") or results.get("variants") or results
    assert all(0 <= next(iter_rates(each)) <= 1 for each in found.values())
    drawn = {"bahdanau": ["alignment.png"], "convs2s": ["alignment.png"], "aspects": ["maps.png"]}
    assert [path.name for path in tmp_path.glob("*.png")] == drawn.get(stage.name, [])


def iter_rates(found):
    """Every rate in nested results."""
    for key, value in found.items():
        if key == "rate":
            yield value
        elif isinstance(value, dict):
            yield from iter_rates(value)
