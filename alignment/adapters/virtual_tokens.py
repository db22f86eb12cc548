"""Prefix and prompt tuning: virtual tokens in front of every document, in peft's file format.

A prefix is trained keys and values in every layer; an encoder-decoder has them before its targets, in the decoder's
attention on itself. A soft prompt is trained vectors that are read as the first tokens; an encoder-decoder has them in
front of its source. Encoder classifiers that read a document's first vector read the first of these, as in peft.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from alignment.adapters.extras import AdapterKind, Change, State, reading_stack
from alignment.adapters.files import CONFIG, build_spec, check_size
from alignment.adapters.layer_names import AnyModel
from alignment.adapters.specs import PrefixSpec, PromptSpec
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.files import read_json_object
from alignment.models.encoder_decoder import EncoderDecoderSpec, Seq2SeqClassifier, Seq2SeqModel
from alignment.models.external.models import ExternalModel, ExternalSeq2SeqModel
from alignment.models.external.rectangles import accepts
from alignment.models.layers import AttentionSpec
from alignment.models.layers.layer_contexts import NO_PREFIX
from alignment.models.native_model import NativeModel

NO_PREFIX_IN_TRANSFORMERS = ("albert", "distilbert", "modernbert")  # encoders


class SoftPrompt(nn.Module):
    """Vectors of P virtual tokens, [P, E], drawn from N(0, 1) as peft's are.

    Source: Lester et al. 2021, arXiv:2104.08691.
    """

    def __init__(self, spec: PrefixSpec | PromptSpec, width: int):
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.tokens, width)
        self.register_buffer("tokens", torch.arange(spec.tokens), persistent=False)

    def forward(self) -> Tensor:
        """[P, E]."""
        return self.embedding(self.tokens)


class PrefixAdapter(SoftPrompt):
    """Keys and values of P virtual tokens for every layer, [layers, 2, P, K, head_dim].

    Source: Li and Liang 2021, arXiv:2101.00190.
    """

    def __init__(self, spec: PrefixSpec, layers: int, heads: int, head_dim: int):
        width = heads * head_dim
        of_all_layers = 2 * layers * heads * head_dim
        inner = spec.projection_width
        super().__init__(spec, width if inner else of_all_layers)
        self.shape = (layers, 2, heads, head_dim)
        self.project = nn.Identity()
        if inner:
            self.project = nn.Sequential(nn.Linear(width, inner), nn.Tanh(), nn.Linear(inner, of_all_layers))

    def forward(self) -> Tensor:
        """[layers, 2, P, K, head_dim]."""
        return self.project(super().forward()).unflatten(1, self.shape).permute(1, 2, 0, 3, 4)


class VirtualTokensKind(AdapterKind):
    """The common part of prefixes and soft prompts."""

    spec: ClassVar[type[PrefixSpec | PromptSpec]]  # class of the settings
    attribute: ClassVar[str]  # of the model, which holds the virtual tokens; ATTRIBUTE_enabled switches them
    unmergeable = "virtual tokens are no change of weights and cannot be merged; keep them as an adapter directory"
    before_head = "base_model."

    def is_attached(self, model: nn.Module) -> bool:
        return getattr(model, self.attribute, None) is not None

    def changes_when_off(self, model: nn.Module) -> list[Change]:
        return [(model, f"{self.attribute}_enabled", False)]

    def holds(self, name: str) -> bool:
        return name.startswith(f"{self.attribute}.")

    def read_spec(self, config: Mapping[str, object], directory: Path) -> PrefixSpec | PromptSpec:
        """The settings of an adapter_config.json; how a soft prompt began is not kept."""
        return build_spec(self.spec, {"tokens": config.get("num_virtual_tokens")}, f"{directory}/{CONFIG}")

    def attach(self, model: AnyModel, spec: PrefixSpec | PromptSpec) -> None:
        """Freeze the model and attach new virtual tokens."""
        raise NotImplementedError

    def of_file(self, model: AnyModel, vectors: Tensor, directory: Path) -> Tensor:
        """Our weights from a file's prompt_embeddings, [P, numbers of a token]."""
        raise NotImplementedError

    def from_file(
        self, model: AnyModel, spec: PrefixSpec | PromptSpec, tensors: State, directory: Path
    ) -> dict[str, Tensor | None]:
        vectors = tensors.pop("prompt_embeddings", None)
        check_size(spec.tokens, [] if vectors is None or not vectors.dim() else [vectors])
        self.attach(model, spec)
        return {
            f"{self.attribute}.embedding.weight": None if vectors is None else self.of_file(model, vectors, directory)
        }


# Prefixes


class PrefixKind(VirtualTokensKind):
    """Prefix tuning.

    peft gives layer l of an encoder-decoder's decoder the slot 2 l of the file, modulo the number of slots. Our files
    have twice as many slots as layers there, the odd ones of zeros, so that every layer has a slot of its own.
    """

    peft_type = "PREFIX_TUNING"
    spec = PrefixSpec
    attribute = "prefix"

    def attach(self, model: AnyModel, spec: PrefixSpec | PromptSpec) -> None:
        assert isinstance(spec, PrefixSpec)
        dimensions = prefix_dimensions(model)
        model.requires_grad_(False)
        model.prefix = PrefixAdapter(spec, *dimensions).to(next(model.parameters()).device)

    def to_file(self, model: AnyModel, state: State) -> tuple[State, dict[str, Any]]:
        from peft import PrefixTuningConfig

        layers, heads, head_dim = prefix_dimensions(model)
        assert isinstance(model.prefix, PrefixAdapter) and isinstance(model.prefix.spec, PrefixSpec)
        # Computed by a copy: the model's own prefix may be sharded, and every rank would have to join its forward.
        prefix = PrefixAdapter(model.prefix.spec, layers, heads, head_dim)
        prefix.load_state_dict(
            {name.removeprefix("prefix."): value for name, value in state.items() if self.holds(name)}
        )
        keys_values = prefix.project(prefix.embedding.weight).detach()  # the network is needed in training only
        two_stacks = _is_encoder_decoder(model)
        if two_stacks:
            slots = keys_values.new_zeros(len(keys_values), layers, 2, keys_values.shape[1] // layers)
            slots[:, :, 0] = keys_values.unflatten(1, (layers, -1))
            keys_values = slots.flatten(1)
        width = heads * head_dim
        return {"prompt_embeddings": keys_values}, PrefixTuningConfig(
            num_virtual_tokens=len(keys_values),
            token_dim=width,
            num_transformer_submodules=2 if two_stacks else 1,
            num_attention_heads=heads,  # peft's "attention heads" are the key-value heads of the cache
            num_layers=2 * layers if two_stacks else layers,
            encoder_hidden_size=width,
        ).to_dict()

    def of_file(self, model: AnyModel, vectors: Tensor, directory: Path) -> Tensor:
        """The slots that peft gives the layers of the model."""
        if not _is_encoder_decoder(model):
            return vectors
        layers, heads, head_dim = prefix_dimensions(model)
        width = 2 * heads * head_dim
        submodules = read_json_object(directory / CONFIG).get("num_transformer_submodules")
        slots = vectors.shape[-1] // width
        if submodules != 2 or vectors.shape[-1] != slots * width or slots < layers:
            raise UserError(
                f"a prefix for the decoder of an encoder-decoder has num_transformer_submodules 2 and at least "
                f"{layers} slots of {width} numbers, and this one has num_transformer_submodules {submodules} and "
                f"{vectors.shape[-1]} numbers; train it again with peft's task_type SEQ_2_SEQ_LM"
            )
        return vectors.unflatten(1, (slots, width))[:, [2 * layer % slots for layer in range(layers)]].flatten(1)


def prefix_dimensions(model: AnyModel) -> tuple[int, int, int]:
    """Number of layers, key-value heads and head_dim, which all layers must share."""
    if isinstance(model, ExternalModel):
        shapes = _external_shapes(model)
    else:
        spec = model.spec.decoder if isinstance(model.spec, EncoderDecoderSpec) else model.spec
        attentions = [layer.attention for layer in spec.layers if isinstance(layer.attention, AttentionSpec)]
        if len(attentions) < len(spec.layers):
            raise UserError(NO_PREFIX)
        if model.config["model_type"] in NO_PREFIX_IN_TRANSFORMERS:
            raise UserError(
                f"transformers' class for {model.config['model_type']!r} ignores a prefix, so that peft could not use "
                "this adapter; take prompt, lora or bottleneck instead"
            )
        shapes = [(attention.key_value_heads, attention.head_dim) for attention in attentions]
    if len(set(shapes)) != 1:
        raise UserError("prefix tuning needs the same key-value heads and head_dim in every layer; use LoRA instead")
    return len(shapes), *shapes[0]


@torch.no_grad()
def _external_shapes(model: ExternalModel) -> list[tuple[int, int]]:
    """Key-value heads and head_dim of each layer of transformers' class, as its cache has them after one token."""
    token = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    target = {"decoder_input_ids": token} if isinstance(model, ExternalSeq2SeqModel) else {}
    past = None
    if accepts(model.inner, "past_key_values"):  # encoders do not
        past = getattr(model.inner(input_ids=token, use_cache=True, **target), "past_key_values", None)
    past = getattr(past, "self_attention_cache", past)
    keys = [getattr(layer, "keys", None) for layer in getattr(past, "layers", ())]
    if not keys or any(not isinstance(x, Tensor) or x.dim() != 4 for x in keys):
        raise UserError(
            f"prefix tuning needs layers that keep keys and values, and {type(model.inner).__name__} does not keep "
            "them in a cache; use LoRA instead"
        )
    return [(x.shape[1], x.shape[3]) for x in keys if isinstance(x, Tensor)]


def _is_encoder_decoder(model: AnyModel) -> bool:
    return isinstance(model, ExternalSeq2SeqModel) or isinstance(model.spec, EncoderDecoderSpec)


# Soft prompts


class PromptKind(VirtualTokensKind):
    """Prompt tuning."""

    peft_type = "PROMPT_TUNING"
    spec = PromptSpec
    attribute = "soft_prompt"

    def attach(self, model: AnyModel, spec: PrefixSpec | PromptSpec, tokenizer: Tokenizer | None = None) -> None:
        device = next(model.parameters()).device
        text = getattr(spec, "init_text", None)
        prompt = SoftPrompt(spec, _vector_width(model)).to(device)
        if text is not None and not prompt.embedding.weight.is_meta:  # sizes alone are wanted there
            if tokenizer is None:
                raise UserError(
                    "adapter.init_text needs the model's tokenizer; give attach(model, spec, tokenizer=...)"
                )
            ids = tokenizer(text)["input_ids"]
            if not ids:
                raise UserError(f"adapter.init_text {text!r} has no token; write a longer text")
            tokens = torch.tensor([ids[i % len(ids)] for i in range(spec.tokens)], device=device)
            prompt.embedding.weight.data.copy_(_token_vectors(model, tokens))
        model.requires_grad_(False)
        model.soft_prompt = prompt

    def to_file(self, model: AnyModel, state: State) -> tuple[State, dict[str, Any]]:
        from peft import PromptTuningConfig

        vectors = state["soft_prompt.embedding.weight"]
        return {"prompt_embeddings": vectors}, PromptTuningConfig(
            num_virtual_tokens=len(vectors),
            token_dim=vectors.shape[1],
            num_transformer_submodules=1,  # an encoder-decoder's prompt stands before its source only
            num_attention_heads=1,  # peft asks for heads and layers, and does not use them
            num_layers=1,
        ).to_dict()

    def of_file(self, model: AnyModel, vectors: Tensor, directory: Path) -> Tensor:
        """The vectors; peft makes as many for the decoder of an encoder-decoder, and leaves them unused."""
        two_stacks = isinstance(model, Seq2SeqModel | Seq2SeqClassifier | ExternalSeq2SeqModel)
        assert isinstance(model.soft_prompt, SoftPrompt)
        tokens = model.soft_prompt.spec.tokens
        return vectors[:tokens] if two_stacks and len(vectors) == 2 * tokens else vectors


def _vector_width(model: AnyModel) -> int:
    """Width of a token's vector, E."""
    if isinstance(model, NativeModel):
        spec = reading_stack(model).spec
        return spec.width if spec.projection is None else spec.projection.width
    if not accepts(model.inner, "inputs_embeds"):
        raise UserError(
            f"prompt tuning needs a model that reads vectors, and {type(model.inner).__name__} has no `inputs_embeds`; "
            "use LoRA instead"
        )
    return model.inner.get_input_embeddings().embedding_dim


@torch.no_grad()
def _token_vectors(model: AnyModel, tokens: Tensor) -> Tensor:
    """Vectors of token ids [n] as the model reads them, [n, E]."""
    if isinstance(model, ExternalModel):
        return model.inner.get_input_embeddings()(tokens)
    return reading_stack(model).token_vectors(tokens)
