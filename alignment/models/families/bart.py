"""BART: learned positions on both sides, norms after each sum and after the embedding, biases everywhere.

Source: Lewis et al. 2019, arXiv:1910.13461; transformers, `models/bart`.
"""

from alignment.errors import raise_all
from alignment.models.encoder_decoder import EncoderDecoderSpec
from alignment.models.families.decoders import activation_problems
from alignment.models.families.family import Family, Key, Task, divides, num_labels, read_keys, span_head
from alignment.models.heads import ClassificationHeadSpec, LanguageHeadSpec, TransformSpec
from alignment.models.init_weights import InitSpec
from alignment.models.layers import (
    AttentionSpec,
    BlockSpec,
    LayerNormSpec,
    LearnedPositionsSpec,
    NoNormSpec,
    PlainFeedForwardSpec,
)
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

KEYS = {
    "vocab_size": Key(int, 50265, 1),
    "max_position_embeddings": Key(int, 1024, 1),
    "d_model": Key(int, 1024, 1),
    "encoder_layers": Key(int, 12, 1),
    "encoder_ffn_dim": Key(int, 4096, 1),
    "encoder_attention_heads": Key(int, 16, 1),
    "decoder_layers": Key(int, 12, 1),
    "decoder_ffn_dim": Key(int, 4096, 1),
    "decoder_attention_heads": Key(int, 16, 1),
    "activation_function": Key(str, "gelu"),
    "dropout": Key(float, 0.1, 0),
    "attention_dropout": Key(float, 0.0, 0),
    "activation_dropout": Key(float, 0.0, 0),
    "classifier_dropout": Key(float, 0.0, 0),
    "init_std": Key(float, 0.02, 0),
    "scale_embedding": Key(bool, False),
    "decoder_start_token_id": Key(int, 2, 0),
}

# Of training and generation, or older names of keys that are there as well.
HARMLESS = (
    "classif_dropout",
    "extra_pos_embeddings",
    "force_bos_token_to_be_generated",
    "gradient_checkpointing",
    "num_hidden_layers",
    "output_past",
    "save_step",
    "student_decoder_layers",
    "student_encoder_layers",
)
FIXED = {
    "add_bias_logits": (False,),
    "add_final_layer_norm": (False,),
    "decoder_layerdrop": (0.0, None),
    "do_blenderbot_90_layernorm": (False,),
    "encoder_layerdrop": (0.0, None),
    "is_decoder": (False,),
    "is_encoder_decoder": (True,),
    "normalize_before": (False,),
    "normalize_embedding": (True,),
    "static_position_embeddings": (False,),
    "tie_word_embeddings": (True,),
}
FIRST_POSITION = 2  # rows of the table before place 0's: once for padding
EPS = 1e-5

STACKS = (  # Hugging Face name                              ours
    ("model.shared.weight",                                  "encoder.embed.weight"),
    ("model.decoder.embed_tokens.weight",                    "decoder.embed.weight"),
    ("model.encoder.embed_positions.weight",                 "encoder.positions.weight"),
    ("model.decoder.embed_positions.weight",                 "decoder.positions.weight"),
)  # fmt: skip
LAYERS = (  # each with a weight and a bias
    ("model.encoder.layernorm_embedding",                    "encoder.embedding_norm"),
    ("model.encoder.layers.{}.self_attn.q_proj",             "encoder.blocks.{}.attention.query"),
    ("model.encoder.layers.{}.self_attn.k_proj",             "encoder.blocks.{}.attention.key"),
    ("model.encoder.layers.{}.self_attn.v_proj",             "encoder.blocks.{}.attention.value"),
    ("model.encoder.layers.{}.self_attn.out_proj",           "encoder.blocks.{}.attention.output"),
    ("model.encoder.layers.{}.self_attn_layer_norm",         "encoder.blocks.{}.attention_norm"),
    ("model.encoder.layers.{}.fc1",                          "encoder.blocks.{}.feedforward.up"),
    ("model.encoder.layers.{}.fc2",                          "encoder.blocks.{}.feedforward.down"),
    ("model.encoder.layers.{}.final_layer_norm",             "encoder.blocks.{}.feedforward_norm"),
    ("model.decoder.layernorm_embedding",                    "decoder.embedding_norm"),
    ("model.decoder.layers.{}.self_attn.q_proj",             "decoder.blocks.{}.attention.query"),
    ("model.decoder.layers.{}.self_attn.k_proj",             "decoder.blocks.{}.attention.key"),
    ("model.decoder.layers.{}.self_attn.v_proj",             "decoder.blocks.{}.attention.value"),
    ("model.decoder.layers.{}.self_attn.out_proj",           "decoder.blocks.{}.attention.output"),
    ("model.decoder.layers.{}.self_attn_layer_norm",         "decoder.blocks.{}.attention_norm"),
    ("model.decoder.layers.{}.encoder_attn.q_proj",          "decoder.blocks.{}.cross.query"),
    ("model.decoder.layers.{}.encoder_attn.k_proj",          "decoder.blocks.{}.cross.key"),
    ("model.decoder.layers.{}.encoder_attn.v_proj",          "decoder.blocks.{}.cross.value"),
    ("model.decoder.layers.{}.encoder_attn.out_proj",        "decoder.blocks.{}.cross.output"),
    ("model.decoder.layers.{}.encoder_attn_layer_norm",      "decoder.blocks.{}.cross_norm"),
    ("model.decoder.layers.{}.fc1",                          "decoder.blocks.{}.feedforward.up"),
    ("model.decoder.layers.{}.fc2",                          "decoder.blocks.{}.feedforward.down"),
    ("model.decoder.layers.{}.final_layer_norm",             "decoder.blocks.{}.feedforward_norm"),
)  # fmt: skip
NAMES = (*STACKS, *((f"{hf}.{leaf}", f"{ours}.{leaf}") for hf, ours in LAYERS for leaf in ("weight", "bias")))
LANGUAGE = (
    ("lm_head.weight",                                       "head.weight"),
    ("final_logits_bias",                                    "head.offset"),
)  # fmt: skip
CLASSIFIER = (
    ("classification_head.dense.weight",                     "head.transform.dense.weight"),
    ("classification_head.dense.bias",                       "head.transform.dense.bias"),
    ("classification_head.out_proj.weight",                  "head.output.weight"),
    ("classification_head.out_proj.bias",                    "head.output.bias"),
)  # fmt: skip
SPAN = (
    ("qa_outputs.weight",                                    "head.output.weight"),
    ("qa_outputs.bias",                                      "head.output.bias"),
)  # fmt: skip


def spec_from_config(config: HFConfig) -> EncoderDecoderSpec:
    """The specification of a BART config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, harmless=HARMLESS, fixed=FIXED)
    problems += activation_problems(value["activation_function"], "activation_function")
    problems += [
        f"config.json: {side}_attention_heads = {value[f'{side}_attention_heads']!r} does not divide d_model = "
        f"{value['d_model']!r}"
        for side in ("encoder", "decoder")
        if not divides(value[f"{side}_attention_heads"], value["d_model"])
    ]
    raise_all(problems)
    end = config.get("eos_token_id", 2)
    return EncoderDecoderSpec(
        encoder=_stack(value, "encoder"),
        decoder=_stack(value, "decoder"),
        start_token=value["decoder_start_token_id"],
        end_token=end if isinstance(end, int) else None,
    )


def _stack(value: HFConfig, side: str) -> TransformerSpec:
    width, longest = value["d_model"], value["max_position_embeddings"]
    inner, activation = value[f"{side}_ffn_dim"], value["activation_function"]
    block = BlockSpec(
        attention=_attention(value, side, causal=side == "decoder"),
        feedforward=PlainFeedForwardSpec(inner, activation, bias=True, dropout=value["activation_dropout"]),
        norm=LayerNormSpec(EPS),
        dropout=value["dropout"],
        wiring="post",
        cross=_attention(value, side, causal=False) if side == "decoder" else None,
    )
    return TransformerSpec(
        vocabulary=value["vocab_size"],
        width=width,
        max_positions=longest,
        blocks=(block,) * value[f"{side}_layers"],
        norm=NoNormSpec(),
        init=InitSpec(value["init_std"], value["init_std"]),
        tied_head=True,
        positions=LearnedPositionsSpec(longest, first=FIRST_POSITION),
        embedding_dropout=value["dropout"],
        embedding_scale=width**0.5 if value["scale_embedding"] else 1.0,
        embedding_norm=LayerNormSpec(EPS),
        head=LanguageHeadSpec(offset=True),
    )


def _attention(value: HFConfig, side: str, *, causal: bool) -> AttentionSpec:
    heads = value[f"{side}_attention_heads"]
    head_dim = value["d_model"] // heads
    scale = head_dim**-0.5
    return AttentionSpec(heads, heads, head_dim, scale, True, True, value["attention_dropout"], causal=causal)


def _sequence_head(config: HFConfig) -> ClassificationHeadSpec:
    """A hidden layer and a linear one on what the decoder says at the end token."""
    transform = TransformSpec(config.get("d_model", KEYS["d_model"].default), "tanh", True)
    dropout = config.get("classifier_dropout", 0.0)
    return ClassificationHeadSpec(
        num_labels(config, 3), transform, dropout=dropout, input_dropout=dropout, pooling="last"
    )


BART = Family(
    name="bart",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="model.",
    tasks={
        "language": Task("BartForConditionalGeneration", LANGUAGE),
        "sequence": Task("BartForSequenceClassification", CLASSIFIER, _sequence_head),
        "span": Task("BartForQuestionAnswering", SPAN, span_head),
    },
    ignored_tensors=(r"(model\.)?(encoder|decoder)\.version",),
    tied_copies=(("model.encoder.embed_tokens.weight", "model.shared.weight"),),
    zeros_if_missing=("final_logits_bias",),
    new_model_config={"dropout": 0.0, "is_encoder_decoder": True, "decoder_start_token_id": 2},
)
