"""BART: learned positions on both sides, norms after each sum and after the embedding, biases everywhere.

Source: Lewis et al. 2019, arXiv:1910.13461; transformers, `models/bart`.
"""

from dataclasses import replace
from functools import partial

from alignment.models.encoder_decoder import EncoderDecoderSpec
from alignment.models.families.decoders import attention_spec
from alignment.models.families.family import SPAN, Family, Name, Task, names_under, span_head
from alignment.models.families.t5 import SEQUENCE, sequence_head
from alignment.models.heads import LanguageHeadSpec
from alignment.models.init_weights import InitSpec
from alignment.models.layers import BlockSpec, LayerNormSpec, LearnedPositionsSpec, NoNormSpec, PlainFeedForwardSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

EPS = 1e-5  # no key sets it


def _stack_names(side: str) -> tuple[Name, ...]:
    """The weight table of the encoder or the decoder."""
    stack, layer, block = f"model.{side}.", f"model.{side}.layers.{{}}.", f"{side}.blocks.{{}}."
    return (
        *names_under(stack, f"{side}.", positions="embed_positions", embedding_norm="layernorm_embedding"),
        *names_under(layer + "self_attn.", block + "attention.", **PROJECTIONS),
        *names_under(layer, block, attention_norm="self_attn_layer_norm", feedforward_norm="final_layer_norm"),
        *names_under(layer, block + "feedforward.", up="fc1", down="fc2"),
    )


PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
NAMES: tuple[Name, ...] = (
    *_stack_names("encoder"),
    *_stack_names("decoder"),
    ("model.shared", "encoder.embed"),
    ("model.decoder.embed_tokens", "decoder.embed"),
    *names_under("model.decoder.layers.{}.encoder_attn.", "decoder.blocks.{}.cross.", **PROJECTIONS),
    ("model.decoder.layers.{}.encoder_attn_layer_norm", "decoder.blocks.{}.cross_norm"),
)


def _spec(value: HFConfig) -> EncoderDecoderSpec:
    end = value.get("eos_token_id", 2)
    return EncoderDecoderSpec(
        encoder=_stack(value, "encoder"),
        decoder=_stack(value, "decoder"),
        start_token=value["decoder_start_token_id"],
        end_token=end if isinstance(end, int) else None,
    )


def _stack(value: HFConfig, side: str) -> TransformerSpec:
    width, longest, decodes = value["d_model"], value["max_position_embeddings"], side == "decoder"
    heads, dropout = f"{side}_attention_heads", value["attention_dropout"]
    attention = attention_spec(value, heads, "d_model", dropout=dropout, causal=decodes)
    block = BlockSpec(
        attention=attention,
        feedforward=PlainFeedForwardSpec(
            value[f"{side}_ffn_dim"], value["activation_function"], bias=True, dropout=value["activation_dropout"]
        ),
        norm=LayerNormSpec(EPS),
        dropout=value["dropout"],
        wiring="post",
        cross=replace(attention, causal=False) if decodes else None,
    )
    return TransformerSpec(
        vocabulary=value["vocab_size"],
        width=width,
        max_positions=longest,
        blocks=(block,) * value[f"{side}_layers"],
        norm=NoNormSpec(),
        init=InitSpec(value["init_std"], value["init_std"]),
        tied_head=True,
        positions=LearnedPositionsSpec(longest, first=2),  # the table has two rows more, one of them for padding
        embedding_dropout=value["dropout"],
        embedding_scale=width**0.5 if value["scale_embedding"] else 1.0,
        embedding_norm=LayerNormSpec(EPS),
        head=LanguageHeadSpec(offset=True),
    )


BART = Family(
    name="bart",
    spec=_spec,
    keys=(
        "vocab_size", "max_position_embeddings", "d_model", "encoder_layers", "encoder_ffn_dim",
        "encoder_attention_heads", "decoder_layers", "decoder_ffn_dim", "decoder_attention_heads",
        "activation_function", "dropout", "attention_dropout", "activation_dropout", "classifier_dropout", "init_std",
        "scale_embedding", "decoder_start_token_id",
    ),
    names=NAMES,
    trunk_prefix="model.",
    tasks={
        "language": Task(
            "BartForConditionalGeneration", (("lm_head.weight", "head.weight"), ("final_logits_bias", "head.offset"))
        ),
        "sequence": Task("BartForSequenceClassification", SEQUENCE, partial(sequence_head, default_labels=3)),
        "span": Task("BartForQuestionAnswering", SPAN, span_head()),
    },
    # Of training and generation, or older names of keys that are there as well.
    harmless=(
        "classif_dropout", "extra_pos_embeddings", "force_bos_token_to_be_generated", "gradient_checkpointing",
        "num_hidden_layers", "output_past", "save_step", "student_decoder_layers", "student_encoder_layers",
    ),
    fixed={
        "add_bias_logits": (False,), "add_final_layer_norm": (False,), "decoder_layerdrop": (0.0, None),
        "do_blenderbot_90_layernorm": (False,), "encoder_layerdrop": (0.0, None), "is_decoder": (False,),
        "is_encoder_decoder": (True,), "normalize_before": (False,), "normalize_embedding": (True,),
        "static_position_embeddings": (False,), "tie_word_embeddings": (True,),
    },
    ignored_tensors=(r"(model\.)?(encoder|decoder)\.version",),
    tied_copies=(("model.encoder.embed_tokens.weight", "model.shared.weight"),),
    zeros_if_missing=("final_logits_bias",),
    new_model_config={"dropout": 0.0, "is_encoder_decoder": True, "decoder_start_token_id": 2},
)  # fmt: skip
