"""T5, mT5, ByT5 and BART: published configs, files old and new, heads, fresh weights, text in and text out."""

import json
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import alignment
from alignment.adapters import LoRASpec, attach, disabled, load_adapter, save_adapter
from alignment.data.tokenizers.load import read_tokenizer_files
from alignment.errors import UserError
from alignment.generation import generate
from alignment.models.build import build_model, empty_model
from alignment.models.families import family_of
from alignment.models.huggingface.checkpoint import load_pretrained, save_model
from alignment.ragged import Ragged, Seq2Seq

T5 = {
    "vocab_size": 61, "d_model": 24, "d_kv": 5, "d_ff": 40, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
    "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": 61, "d_model": 24, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 6, "max_position_embeddings": 64,
}  # fmt: skip
TINY = {"t5": T5, "mt5": T5, "bart": BART}
END = {"t5": 1, "mt5": 1, "bart": 2}

T5_SMALL = {
    "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 512,
    "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "initializer_factor": 1.0,
    "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "model_type": "t5", "n_positions": 512, "num_heads": 8,
    "num_layers": 6, "output_past": True, "pad_token_id": 0, "relative_attention_num_buckets": 32,
    "task_specific_params": {"summarization": {"num_beams": 4}}, "vocab_size": 32128,
}  # fmt: skip
FLAN = {
    **T5_SMALL, "d_model": 768, "num_heads": 12, "num_layers": 12, "num_decoder_layers": 12,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip
BYT5 = {
    **T5_SMALL, "d_model": 1472, "d_ff": 3584, "num_heads": 6, "num_layers": 12, "num_decoder_layers": 4,
    "feed_forward_proj": "gated-gelu", "gradient_checkpointing": False, "tie_word_embeddings": False,
    "tokenizer_class": "ByT5Tokenizer", "vocab_size": 384,
}  # fmt: skip
MT5_SMALL = {
    "architectures": ["MT5ForConditionalGeneration"], "d_ff": 1024, "d_kv": 64, "d_model": 512,
    "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "model_type": "mt5",
    "num_decoder_layers": 8, "num_heads": 6, "num_layers": 8, "pad_token_id": 0, "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False, "tokenizer_class": "T5Tokenizer", "use_cache": True, "vocab_size": 250112,
}  # fmt: skip
BART_BASE = {
    "activation_dropout": 0.1, "activation_function": "gelu", "add_bias_logits": False, "add_final_layer_norm": False,
    "architectures": ["BartModel"], "attention_dropout": 0.1, "bos_token_id": 0, "classif_dropout": 0.1,
    "classifier_dropout": 0.0, "d_model": 768, "decoder_attention_heads": 12, "decoder_ffn_dim": 3072,
    "decoder_layerdrop": 0.0, "decoder_layers": 6, "decoder_start_token_id": 2, "dropout": 0.1,
    "early_stopping": True, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072, "encoder_layerdrop": 0.0,
    "encoder_layers": 6, "eos_token_id": 2, "forced_eos_token_id": 2, "forced_bos_token_id": 0,
    "gradient_checkpointing": False, "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}, "init_std": 0.02,
    "is_encoder_decoder": True, "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
    "max_position_embeddings": 1024, "model_type": "bart", "no_repeat_ngram_size": 3, "normalize_before": False,
    "normalize_embedding": True, "num_beams": 4, "num_hidden_layers": 6, "pad_token_id": 1, "scale_embedding": False,
    "task_specific_params": {}, "use_cache": True, "vocab_size": 50265,
}  # fmt: skip
BART_LARGE = {
    **BART_BASE, "d_model": 1024, "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "decoder_layers": 12,
    "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "encoder_layers": 12, "num_hidden_layers": 12,
    "static_position_embeddings": False, "extra_pos_embeddings": 2, "output_past": False, "_num_labels": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters"),
    [  # as their model cards and papers count them
        (T5_SMALL, 60_506_624),
        (FLAN, 247_577_856),
        (BYT5, 299_637_760),
        (MT5_SMALL, 300_176_768),
        (BART_BASE, 139_420_416),
        (BART_LARGE, 406_291_456),
    ],
    ids=["t5-small", "flan-t5-base", "byt5-small", "mt5-small", "bart-base", "bart-large"],
)
def test_published_configs_have_their_published_size(config, parameters):
    with torch.device("meta"):
        model = empty_model(config, "language")
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_t5_scales_its_logits_unless_the_file_is_of_version_1_1():
    def scale(**keys):
        return family_of({"model_type": "t5"}).spec_from_config({**T5, "model_type": "t5", **keys}).decoder.head.scale

    assert scale() == scale(tie_word_embeddings=True) == 24**-0.5
    assert scale(tie_word_embeddings=False) == 1.0
    assert scale(tie_word_embeddings=True, scale_decoder_outputs=False) == 1.0
    assert scale(tie_word_embeddings=False, scale_decoder_outputs=True) == 24**-0.5
    assert family_of({"model_type": "mt5"}).spec_from_config({"model_type": "mt5"}).decoder.head.scale == 1.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5", "num_head": 4}, "unknown key 'num_head'; did you mean 'num_heads'"),
        ({"model_type": "t5", "d_kv": 0}, "d_kv must be at least 1, got 0"),
        ({"model_type": "t5", "feed_forward_proj": "gated-sine"}, "feed_forward_proj 'gated-sine' is not one of"),
        (
            {"model_type": "t5", "feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"},
            "dense_act_fn = 'gelu' contr",
        ),
        ({"model_type": "t5", "is_gated_act": True}, "is_gated_act = True contradicts feed_forward_proj = 'relu'"),
        ({"model_type": "t5", "relative_attention_max_distance": 16}, "relative_attention_max_distance = 16 more than"),
        ({"model_type": "t5", "relative_attention_num_buckets": 9}, "relative_attention_num_buckets = 9 must be even"),
        ({"model_type": "mt5", "scale_decoder_outputs": True}, "unknown key 'scale_decoder_outputs'"),
        ({"model_type": "bart", "normalize_before": True}, "normalize_before = True is not supported"),
        ({"model_type": "bart", "encoder_layerdrop": 0.1}, "encoder_layerdrop = 0.1 is not supported"),
        ({"model_type": "bart", "decoder_attention_heads": 7}, "decoder_attention_heads = 7 does not divide d_model"),
        ({"model_type": "bart", "activation_function": "sine"}, "activation_function 'sine' is not one of"),
        ({"model_type": "bart", "is_encoder_decoder": False}, "is_encoder_decoder = False is not supported"),
        ({"model_type": "bart", "tie_word_embeddings": False}, "tie_word_embeddings = False is not supported"),
    ],
)
def test_configs_that_cannot_be_followed_are_refused(config, message):
    with pytest.raises(UserError, match=message):
        family_of(config).spec_from_config(config)


def written(directory, name, door="AutoModelForSeq2SeqLM", **more):
    """A random checkpoint by transformers; returns its model."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**TINY[name], **more})
    model = getattr(transformers, door).from_config(config).eval()
    with torch.no_grad():
        for tensor in {id(x): x for x in model.state_dict(keep_vars=True).values() if x.is_floating_point()}.values():
            tensor += 0.15 * torch.randn_like(tensor)
    model.save_pretrained(directory)
    return model


def edit(directory, change, **keys):
    """The checkpoint with its tensors changed and config keys added."""
    path, tensors = directory / "model.safetensors", load_file(directory / "model.safetensors")
    save_file(change(tensors), path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **keys}))


def texts(end, count=3):
    generator = torch.Generator().manual_seed(1)
    return [[*torch.randint(3, 61, (length,), generator=generator).tolist(), end] for length in (9, 2, 17)[:count]]


def padded(rows, filler):
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])


def logits_of(model, source=(5, 9, 11, 1), target=(0, 7, 8)):
    return model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target])).logits


@pytest.mark.parametrize("tied", [False, True], ids=["as 1.1 was published", "as transformers 5 saves it"])
def test_a_t5_head_of_its_own_is_kept_whatever_the_config_says(tmp_path, tied):
    written(tmp_path, "t5", feed_forward_proj="gated-gelu")
    keys = {"tie_word_embeddings": tied, "scale_decoder_outputs": False}
    if not tied:
        keys = {"tie_word_embeddings": False}
        config = json.loads((tmp_path / "config.json").read_text())
        config.pop("scale_decoder_outputs")
        (tmp_path / "config.json").write_text(json.dumps(config))
    own = torch.randn(61, 24, generator=torch.Generator().manual_seed(3))
    edit(tmp_path, lambda tensors: {**tensors, "lm_head.weight": own}, **keys)
    ours = load_pretrained(tmp_path)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert ours.head.weight is not ours.encoder.embed.weight
    assert torch.equal(ours.head.weight, own)
    assert_close(logits_of(ours), logits_of(theirs), atol=1e-4, rtol=0)
    save_model(ours, tmp_path / "again")
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(logits_of(again), logits_of(theirs))


def test_an_mt5_head_of_its_own_is_kept(tmp_path):
    written(tmp_path, "mt5")
    own = torch.randn(61, 24)
    edit(tmp_path, lambda tensors: {**tensors, "lm_head.weight": own})
    theirs = transformers.MT5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert_close(logits_of(load_pretrained(tmp_path)), logits_of(theirs), atol=1e-4, rtol=0)


def test_an_untied_t5_without_its_head_is_refused(tmp_path):
    written(tmp_path, "t5")
    edit(tmp_path, lambda tensors: tensors, tie_word_embeddings=False)
    with pytest.raises(UserError, match=r"tensor lm_head\.weight is missing"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("name", sorted(TINY))
def test_older_files_hold_the_token_table_more_than_once(name, tmp_path):
    written(tmp_path, name)
    expected = logits_of(load_pretrained(tmp_path))
    stem = "model." if name == "bart" else ""
    stacks = [f"{stem}{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"

    def older(tensors):
        table = tensors[f"{stem}shared.weight"]
        more = {} if name == "bart" else {unused: torch.ones(32, 4)}
        return {**tensors, **{copy: table.clone() for copy in (*stacks, "lm_head.weight")}, **more}

    edit(tmp_path, older)
    assert torch.equal(logits_of(load_pretrained(tmp_path)), expected)
    edit(tmp_path, lambda tensors: {**tensors, stacks[0]: tensors[stacks[0]] + 1})
    with pytest.raises(UserError, match=f"{stacks[0]} differs"):
        load_pretrained(tmp_path)


def test_a_bare_bart_has_no_prefix_and_no_constants_for_its_logits(tmp_path):
    written(tmp_path, "bart")
    with_constants = load_pretrained(tmp_path)
    constants = with_constants.head.offset.clone()
    assert constants.abs().max() > 0.1

    def bare(tensors):
        kept = {name.removeprefix("model."): x for name, x in tensors.items() if name != "final_logits_bias"}
        return {**kept, "encoder.embed_tokens.weight": kept["shared.weight"].clone()}

    edit(tmp_path, bare)
    assert_close(logits_of(load_pretrained(tmp_path)), logits_of(with_constants) - constants)


def test_barts_constants_are_saved_and_not_trained(tmp_path):
    written(tmp_path, "bart")
    model = load_pretrained(tmp_path)
    assert "head.offset" in model.state_dict()
    assert all("offset" not in name for name, _ in model.named_parameters())
    save_model(model, tmp_path / "again")
    assert torch.equal(load_file(tmp_path / "again/model.safetensors")["final_logits_bias"], model.head.offset)


@pytest.mark.parametrize("name", sorted(TINY))
@pytest.mark.parametrize("task", ["sequence", "span", "tokens"])
@torch.no_grad()
def test_heads_give_transformers_scores(name, task, tmp_path):
    if (name, task) == ("bart", "tokens"):
        with pytest.raises(UserError, match="bart has no head for 'tokens'"):
            build_model({"model_type": "bart"}, "tokens")
        return
    stem = {"t5": "T5", "mt5": "MT5", "bart": "Bart"}[name]
    kind = {"sequence": "SequenceClassification", "span": "QuestionAnswering", "tokens": "TokenClassification"}[task]
    model_class = getattr(transformers, f"{stem}For{kind}")
    torch.manual_seed(0)
    labels = 2 if task == "span" else 5
    config = transformers.AutoConfig.for_model(name, **TINY[name], num_labels=labels)
    reference = model_class(config).eval()
    reference.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, task)
    rows = texts(END[name])
    ids, mask = padded(rows, config.pad_token_id)
    out = reference(input_ids=ids, attention_mask=mask)
    expected = torch.stack([out.start_logits, out.end_logits], -1) if task == "span" else out.logits
    scores, batched = model(ids, mask).logits, model(batch=Ragged.build(rows)).logits
    if task == "sequence":
        assert_close(scores, expected, atol=1e-5, rtol=0)
        assert_close(batched, expected, atol=1e-5, rtol=0)
    else:
        assert_close(scores[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=0)
        assert_close(batched, expected[mask.bool()], atol=1e-5, rtol=0)
    save_model(model, tmp_path / "again")
    again = model_class.from_pretrained(tmp_path / "again").eval()
    assert {name: x.tolist() for name, x in again.state_dict().items()} == {
        name: x.tolist() for name, x in reference.state_dict().items()
    }


@pytest.mark.parametrize(("name", "task"), [("t5", "sequence"), ("t5", "tokens"), ("t5", "span"), ("bart", "sequence")])
def test_a_language_model_becomes_a_reader_with_a_new_head(name, task, tmp_path):
    written(tmp_path, name, **({"feed_forward_proj": "gated-gelu"} if name == "t5" else {}))
    language = load_pretrained(tmp_path)
    torch.manual_seed(0)
    reader = load_pretrained(tmp_path, task, new_head=True, config={"num_labels": 2})
    encoder = reader.trunk if task == "tokens" else reader.encoder
    for key, value in language.encoder.state_dict().items():
        assert torch.equal(encoder.state_dict()[key], value), key
    assert reader.head.output.weight.abs().max() > 0
    assert reader(batch=Ragged.build(texts(END[name]))).logits.shape[-1] == 2
    with pytest.raises(UserError, match="is missing"):
        load_pretrained(tmp_path, task)


def test_a_classifiers_stacks_become_a_language_model(tmp_path):
    config: Any = transformers.AutoConfig.for_model("t5", **T5)
    transformers.T5ForSequenceClassification(config).save_pretrained(tmp_path)
    reader, language = load_pretrained(tmp_path, "sequence"), load_pretrained(tmp_path, new_head=True)
    for key, value in reader.decoder.state_dict().items():
        assert torch.equal(language.decoder.state_dict()[key], value), key
    assert language.head.weight is language.encoder.embed.weight


def test_fresh_t5_weights_have_the_deviations_of_its_paper():
    torch.manual_seed(0)
    config = {
        "model_type": "t5",
        "vocab_size": 2000,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 256,
        "num_heads": 8,
        "num_layers": 1,
    }
    model = build_model(config)
    block = model.decoder.blocks[0]
    expected = {
        model.encoder.embed.weight: 1.0,
        block.attention.query.weight: (64 * 16) ** -0.5,  # for there is no scale on the scores
        block.cross.query.weight: (64 * 16) ** -0.5,
        block.attention.key.weight: 64**-0.5,
        block.attention.output.weight: 128**-0.5,
        block.feedforward.up.weight: 64**-0.5,
        block.feedforward.down.weight: 256**-0.5,
        model.decoder.distance.weight: 64**-0.5,
    }
    for weight, std in expected.items():
        assert weight.std().item() == pytest.approx(std, rel=0.1)
    assert model.head.weight is model.encoder.embed.weight is model.decoder.embed.weight
    assert model.head.out_features == 2000
    untied = build_model({**config, "tie_word_embeddings": False})
    assert untied.head.weight.std().item() == pytest.approx(64**-0.5, rel=0.1)
    # Either way a model begins near indifference: logits of deviation about 1.
    for fresh in (model, untied):
        logits = fresh(torch.arange(9)[None], decoder_input_ids=torch.arange(9)[None]).logits
        assert 0.5 < logits.std() < 2


def test_fresh_models_have_no_dropout_and_know_how_to_begin():
    for name in TINY:
        model = build_model({"model_type": name, **TINY[name]})
        assert not [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]
        assert model.config["is_encoder_decoder"] and model.config["decoder_start_token_id"] == model.spec.start_token
    assert build_model({"model_type": "bart", **BART, "dropout": 0.3}).encoder.blocks[0].dropout.p == 0.3


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_lora_on_both_stacks_is_what_peft_makes_of_the_file(name, tmp_path):
    from peft import PeftModel

    reference = written(tmp_path / "base", name)
    model = attach(load_pretrained(tmp_path / "base"), LoRASpec(rank=4, layers=r"(attention|cross)\.(query|value)"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            assert parameter.requires_grad == (".lora_" in key)
            if "lora_B" in key:
                parameter.normal_(generator=generator)
    adapted = logits_of(model)
    with disabled(model):
        assert_close(logits_of(model), logits_of(reference), atol=1e-4, rtol=0)
    assert (adapted - logits_of(reference)).abs().max() > 0.1
    save_adapter(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["task_type"] == "SEQ_2_SEQ_LM"
    again = load_adapter(load_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(logits_of(again), adapted)
    theirs = PeftModel.from_pretrained(reference, str(tmp_path / "adapter")).eval()
    assert_close(logits_of(theirs), adapted, atol=1e-4, rtol=0)


WORDS = ["a", "small", "fox", "sees", "the", "red", "house", "and", "an", "old", "river", "runs", "to", "my", "sea"]
PROMPTS = [" ".join(WORDS[i % 15 : i % 15 + 1 + i % 5]) for i in range(16)]


def tokenizer_with(end, pad):
    """A WordLevel tokenizer that ends every text as the family does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    raw = Tokenizer(models.WordLevel(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = ["", "", "", "<unk>"]
    specials[pad], specials[end] = "<pad>", "</s>"
    specials[next(i for i in range(3) if i not in (pad, end))] = "<s>"
    raw.train_from_iterator(PROMPTS, trainers.WordLevelTrainer(special_tokens=specials, vocab_size=61))
    raw.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="</s>", pad_token="<pad>", bos_token="<s>", unk_token="<unk>"
    )


def talkative(tensors, end):
    """Weights that make a model heed its source and, now and then, come to an end."""
    table = next(x for name, x in tensors.items() if name.endswith("shared.weight"))
    table[end] = table[5:9].sum(0)
    if "final_logits_bias" in tensors:
        tensors["final_logits_bias"][0, end] -= 1  # BART begins with its end token, and repeats what it reads
    across = ("EncDecAttention.o.weight", "encoder_attn.out_proj.weight")
    return {name: 20 * x if name.endswith(across) else x for name, x in tensors.items()}


@pytest.mark.parametrize("name", sorted(TINY))
@pytest.mark.parametrize("beams", [1, 4])
def test_text_in_text_out_equals_transformers(name, beams, tmp_path):
    special = {"end": END[name], "pad": 1 if name == "bart" else 0}
    theirs = type(written(tmp_path, name, vocab_size=len(tokenizer_with(**special))))
    edit(tmp_path, lambda tensors: talkative(tensors, END[name]))
    theirs = theirs.from_pretrained(tmp_path).eval()
    tokenizer_with(**special).save_pretrained(tmp_path)
    model, tokenizer = alignment.load_model(str(tmp_path)), read_tokenizer_files(tmp_path)
    assert model.source == "native"
    made = generate(model, tokenizer, PROMPTS, max_new_tokens=12, temperature=0.0, num_beams=beams)
    encoded = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="right")
    expected = theirs.generate(
        input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"], max_new_tokens=12, num_beams=beams,
        do_sample=False, forced_eos_token_id=None,
    )  # fmt: skip
    for row, tokens in zip(expected[:, 1:].tolist(), made.token_ids, strict=True):
        assert row[: len(tokens)] == tokens
        assert set(row[len(tokens) :]) <= {special["pad"], special["end"]}  # their search fills up with either
    assert made.texts == tokenizer.batch_decode(expected, skip_special_tokens=True)
    assert len({*map(tuple, made.token_ids)}) > 1  # the source is heeded
    assert any(made.ended) or name == "bart"


def test_log_probs_of_what_was_generated_are_those_of_training(tmp_path):
    written(tmp_path, "t5")
    tokenizer_with(end=1, pad=0).save_pretrained(tmp_path)
    model, tokenizer = alignment.load_model(str(tmp_path)), read_tokenizer_files(tmp_path)
    made = alignment.generate(model, tokenizer, PROMPTS, max_new_tokens=8, seed=3)
    sources = tokenizer(PROMPTS)["input_ids"]
    targets = [[model.spec.start_token, *tokens] for tokens in made.token_ids]
    scored = model(batch=Seq2Seq(Ragged.build(sources), Ragged.build(targets))).log_probs
    assert_close(scored, torch.tensor([x for row in made.log_probs for x in row]), atol=1e-4, rtol=0)
