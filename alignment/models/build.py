"""Specification -> module: the one place where a name becomes a part. Reads no files (see checkpoint.py)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from alignment.errors import UserError
from alignment.models.classifiers import ScalarModel, SequenceClassifier, TokenClassifier
from alignment.models.encoder_decoder import Seq2SeqClassifier, Seq2SeqModel
from alignment.models.families import family_of
from alignment.models.heads import ClassificationHead, LanguageHead, Transform, VocabularyHead
from alignment.models.init_weights import initialize
from alignment.models.language_model import LanguageModel, MaskedLanguageModel
from alignment.models.layers.attention import Attention, CrossAttention
from alignment.models.layers.attention_context import Bearings
from alignment.models.layers.block import Block, NormedResidualBlock, ParallelBlock, PostNormBlock, SandwichBlock
from alignment.models.layers.disentangled import Convolution, ConvolvedBlock, DisentangledAttention, RelativeEmbedding
from alignment.models.layers.experts import Experts
from alignment.models.layers.feedforward import ACTIVATIONS, FeedForward, GatedFeedForward
from alignment.models.layers.norms import Float32RMSNorm, RMSNorm, UnitOffsetRMSNorm
from alignment.models.layers.position_bias import Alibi, BFloat16Alibi, RelativeBias
from alignment.models.layers.position_embeddings import LearnedPositions, SinusoidalPositions
from alignment.models.layers.rotary import Rotary
from alignment.models.spec import (
    AttentionSpec,
    BlockSpec,
    ExpertsSpec,
    FeedForwardSpec,
    GatedFeedForwardSpec,
    LanguageHeadSpec,
    LayerNormSpec,
    NoNormSpec,
    NormSpec,
    PlainFeedForwardSpec,
    ReadoutSpec,
    RMSNormSpec,
    TransformerSpec,
    TransformSpec,
    UnitOffsetRMSNormSpec,
    WideRMSNormSpec,
)
from alignment.models.spec_disentangled import ConvolutionSpec, DisentangledSpec
from alignment.models.spec_encoder_decoder import EncoderDecoderSpec
from alignment.models.spec_positions import (
    AlibiSpec,
    LearnedPositionsSpec,
    PositionsSpec,
    RelativeBiasSpec,
    RoundedAlibiSpec,
    SinusoidalPositionsSpec,
)
from alignment.models.transformer import Parts, Transformer


def build_model(config: dict[str, Any], task: str = "language") -> Any:
    """A model with fresh weights, in eval mode.

    Args:
        config: a Hugging Face config, at least {"model_type": ...}. Keys left out have transformers' defaults, but
            dropout is off unless asked for.
        task: language, scalar, next_sentence, sequence, tokens or span, as far as the family has it.

    Raises:
        UserError: unknown family, unknown key, or a value that cannot be; a task the family does not have.
    """
    config = {**family_of(config).new_model_config, **config}
    return initialize(empty_model(config, task))


def build_language_model(config: dict[str, Any]) -> Any:
    """A language model with fresh weights, in eval mode; see `build_model`."""
    return build_model(config, "language")


def build_scalar_model(config: dict[str, Any]) -> ScalarModel:
    """A scalar model (reward or value) with fresh weights; `config` as for `build_model`."""
    return build_model(config, "scalar")


def empty_model(config: dict[str, Any], task: str) -> Any:
    """A model whose weights mean nothing yet."""
    family, config = family_of(config), dict(config)
    if task not in family.tasks:
        raise UserError(f"{family.name} has no head for {task!r}, only {', '.join(sorted(family.tasks))}")
    readout = family.tasks[task].readout
    if task == "scalar" and readout is not None:  # an encoder's: one class, read where all are
        config |= {"num_labels": 1, "id2label": {"0": "score"}, "label2id": {"score": 0}}
        task = "sequence"
    spec = family.spec_from_config(config)
    if isinstance(spec, EncoderDecoderSpec):
        return encoder_decoder_model(spec, None if readout is None else readout(config), config, task)
    trunk = build_trunk(spec)
    if task == "scalar":
        return ScalarModel(trunk, config)
    if task == "language" and spec.causal:
        return LanguageModel(trunk, _language_head(spec), config)
    if task in ("language", "next_sentence"):
        follows = None if readout is None else _readout(readout(config), spec.width)
        return MaskedLanguageModel(trunk, _language_head(spec), config, task, follows)  # type: ignore[arg-type]
    assert readout is not None
    read = readout(config)
    if task == "sequence":
        assert read.pooling is not None
        return SequenceClassifier(trunk, _readout(read, spec.output_width or spec.width), config, read.pooling)
    return TokenClassifier(trunk, _readout(read, spec.output_width or spec.width), config, task)  # type: ignore[arg-type]


def encoder_decoder_model(spec: EncoderDecoderSpec, read: ReadoutSpec | None, config: dict[str, Any], task: str) -> Any:
    """An encoder-decoder with its head; a classifier of tokens has the encoder alone."""
    encoder = build_trunk(spec.encoder)
    if task == "tokens" and read is not None:
        return TokenClassifier(encoder, _readout(read, spec.encoder.width), config, "tokens")
    decoder = build_trunk(spec.decoder)
    if read is None:
        return Seq2SeqModel(encoder, decoder, _language_head(spec.decoder), config, spec)
    return Seq2SeqClassifier(encoder, decoder, _readout(read, spec.decoder.width), config, spec, task)  # type: ignore[arg-type]


def build_trunk(spec: TransformerSpec) -> Transformer:
    """The trunk `spec` describes."""
    blocks = [build_block(block, spec.width) for block in spec.blocks]
    narrow = spec.width if spec.projection is None else spec.projection.width
    beside = spec.projection is None or spec.projection.before_positions
    parts = Parts(
        norm=_norm(spec.norm, spec.width)(),
        bearings=_bearings(spec),
        positions=_positions(spec.positions, spec.width if beside else narrow),
        embedding_norm=None if spec.embedding_norm is None else _norm(spec.embedding_norm, narrow)(),
        project_in=None if spec.projection is None else nn.Linear(narrow, spec.width, bias=spec.projection.bias),
        project_out=None if spec.output_width is None else nn.Linear(spec.width, spec.output_width, bias=False),
        relative=RelativeEmbedding(2 * spec.relative, spec.width, _norm(spec.relative_norm, spec.width)())
        if spec.relative
        else None,
    )
    return Transformer(spec, blocks, parts)


def build_block(spec: BlockSpec, width: int) -> nn.Module:
    """One layer."""
    attention, feedforward = _attention(spec.attention, width), _feedforward(spec.feedforward, width)
    cross = None if spec.cross is None else CrossAttention(spec.cross, width, width)
    norm, dropout = _norm(spec.norm, width), nn.Dropout(spec.dropout) if spec.dropout else nn.Identity()
    match spec.wiring:
        case "pre":
            first = None if spec.attention_norm is None else _norm(spec.attention_norm, width)
            return Block(attention, feedforward, norm, dropout, first, cross)
        case "post":
            block = PostNormBlock(attention, feedforward, norm, dropout, cross)
            return block if spec.convolution is None else _convolved(block, spec.convolution, norm, dropout, width)
        case "residual":
            return NormedResidualBlock(attention, feedforward, norm, dropout)
        case "sandwich" | "output":
            return SandwichBlock(
                attention, feedforward, norm, dropout, norm if spec.wiring == "sandwich" else nn.Identity
            )
        case "parallel" | "parallel_shared":
            return ParallelBlock(attention, feedforward, norm, dropout, spec.wiring == "parallel_shared")


def _convolved(
    block: nn.Module, spec: ConvolutionSpec, norm: Callable[[], nn.Module], dropout: nn.Module, width: int
) -> nn.Module:
    layer = nn.Conv1d(width, width, spec.width, padding=spec.width // 2, groups=spec.groups)
    return ConvolvedBlock(block, Convolution(layer, ACTIVATIONS[spec.activation], dropout), norm())


def _attention(spec: AttentionSpec | DisentangledSpec, width: int) -> nn.Module:
    if isinstance(spec, DisentangledSpec):
        return DisentangledAttention(spec, width)
    norm = spec.query_key_norm
    return Attention(spec, width, None if norm is None else lambda columns: _norm(norm, columns)())


def _norm(spec: NormSpec, width: int) -> Callable[[], nn.Module]:
    match spec:
        case LayerNormSpec(eps=eps, bias=bias, weight=weight):
            return partial(nn.LayerNorm, width, eps=eps, elementwise_affine=weight, bias=bias)
        case RMSNormSpec(eps=eps):
            return partial(RMSNorm, width, eps)
        case WideRMSNormSpec(eps=eps):
            return partial(Float32RMSNorm, width, eps)
        case UnitOffsetRMSNormSpec(eps=eps):
            return partial(UnitOffsetRMSNorm, width, eps)
        case NoNormSpec():
            return nn.Identity


def _feedforward(spec: FeedForwardSpec, width: int) -> nn.Module:
    match spec:
        case PlainFeedForwardSpec():
            return FeedForward(width, spec.width, ACTIVATIONS[spec.activation], spec.bias, spec.dropout)
        case GatedFeedForwardSpec():
            return GatedFeedForward(width, spec.width, ACTIVATIONS[spec.activation], spec.bias, spec.dropout)
        case ExpertsSpec():
            experts = [_feedforward(spec.expert, width) for _ in range(spec.count)]
            return Experts(width, experts, spec.chosen, spec.normalized, spec.balance_coef > 0)


def _positions(spec: PositionsSpec | None, width: int) -> nn.Module | None:
    match spec:
        case LearnedPositionsSpec(count=count, first=first):
            return LearnedPositions(count, width, first)
        case SinusoidalPositionsSpec():
            return SinusoidalPositions(width)
        case None:
            return None


def _bearings(spec: TransformerSpec) -> Bearings:
    specs = [block.attention for block in spec.blocks if isinstance(block.attention, AttentionSpec)]
    distances = {(spec.distance, spec.heads, spec.causal) for spec in specs if spec.distance is not None}
    if len(distances) > 1:
        raise ValueError(f"layers share one bias for distances, and these differ: {distances}")
    rotaries = {attention.rotary: Rotary(attention.rotary) for attention in specs if attention.rotary is not None}
    if not distances:
        return Bearings(rotaries, None)
    [(distance, heads, causal)] = distances
    match distance:
        case AlibiSpec(scale=scale):
            return Bearings(rotaries, Alibi(heads, scale))
        case RoundedAlibiSpec(scale=scale):
            return Bearings(rotaries, BFloat16Alibi(heads, scale))
        case RelativeBiasSpec(buckets=buckets, max_distance=far):
            return Bearings(rotaries, RelativeBias(buckets, far, heads, bidirectional=not causal))


def _transform(spec: TransformSpec | None, width: int) -> Transform | None:
    if spec is None:
        return None
    dense = nn.Linear(width, spec.width, bias=spec.bias)
    return Transform(dense, ACTIVATIONS[spec.activation], _norm(spec.norm, spec.width)())


def _language_head(spec: TransformerSpec) -> VocabularyHead:
    width = spec.output_width or spec.width
    if spec.head == LanguageHeadSpec():
        return nn.Linear(width, spec.vocabulary, bias=False)
    return LanguageHead(spec.head, width, spec.vocabulary, _transform(spec.head.transform, width))


def _readout(spec: ReadoutSpec, width: int) -> ClassificationHead:
    inner = width if spec.transform is None else spec.transform.width
    output = nn.Linear(inner, spec.outputs, bias=spec.bias)
    return ClassificationHead(_transform(spec.transform, width), output, spec.dropout, spec.input_dropout)
