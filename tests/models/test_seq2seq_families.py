"""T5, mT5, ByT5 and BART: files old and new, heads, fresh weights, text in and text out."""

import json
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from alignment.adapters import LoRASpec, attach, disabled, load_adapter, save_adapter
from alignment.errors import UserError
from alignment.models.build import build_model
from alignment.models.families import family_of
from alignment.models.huggingface.checkpoint import load_pretrained, save_model
from alignment.ragged import Ragged

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


def test_t5_scales_its_logits_unless_the_file_is_of_version_1_1():
    def scale(**keys):
        return family_of({"model_type": "t5"}).spec_from_config({**T5, "model_type": "t5", **keys}).decoder.head.scale

    assert scale() == scale(tie_word_embeddings=True) == 24**-0.5
    assert scale(tie_word_embeddings=False) == 1.0
    assert scale(tie_word_embeddings=True, scale_decoder_outputs=False) == 1.0
    assert scale(tie_word_embeddings=False, scale_decoder_outputs=True) == 24**-0.5
    assert family_of({"model_type": "mt5"}).spec_from_config({"model_type": "mt5"}).decoder.head.scale == 1.0


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
        "model_type": "t5", "vocab_size": 2000, "d_model": 64, "d_kv": 16, "d_ff": 256, "num_heads": 8, "num_layers": 1,
    }  # fmt: skip
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
