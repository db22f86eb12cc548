"""Prompt tuning: trained vectors that are read as the first tokens of every document, in peft's file format.

An encoder-decoder has them in front of its source. Encoder classifiers that read a document's first vector read the
first of these, as in peft.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from alignment.adapters.files import CONFIG, build_spec, check_size
from alignment.adapters.specs import PromptSpec
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.models.encoder_decoder import Seq2SeqClassifier, Seq2SeqModel
from alignment.models.external.models import ExternalModel, ExternalSeq2SeqModel
from alignment.models.external.padding import accepts
from alignment.models.native_model import NativeModel
from alignment.models.transformer import Transformer

if TYPE_CHECKING:
    from peft import PeftConfig


class SoftPrompt(nn.Module):
    """Vectors of P virtual tokens, [P, E], drawn from N(0, 1) as peft's are.

    Source: Lester et al. 2021, arXiv:2104.08691; the parameters are those of peft's `PromptEmbedding`.
    """

    def __init__(self, spec: PromptSpec, width: int):
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.tokens, width)
        self.register_buffer("tokens", torch.arange(spec.tokens), persistent=False)

    def forward(self) -> Tensor:
        """[P, E]."""
        return self.embedding(self.tokens)


def attach_prompt(model: NativeModel | ExternalModel, spec: PromptSpec, tokenizer: Tokenizer | None = None) -> None:
    """Freeze the model and attach a new soft prompt.

    Args:
        tokenizer: the model's, for a prompt that starts from `spec.init_text`.

    Raises:
        UserError: the model does not take vectors in place of tokens, or there is no tokenizer for the text.
    """
    width, device = prompt_width(model), next(model.parameters()).device
    prompt = SoftPrompt(spec, width).to(device)
    if not prompt.embedding.weight.is_meta:  # sizes alone are wanted there
        tokens = _initial_tokens(spec, model.spec.vocabulary, tokenizer)
        if tokens is not None:
            with torch.no_grad():
                prompt.embedding.weight.copy_(_token_vectors(model, tokens.to(device)))
    model.requires_grad_(False)
    model.soft_prompt = prompt


def _initial_tokens(spec: PromptSpec, vocabulary: int, tokenizer: Tokenizer | None) -> Tensor | None:
    """Ids of the tokens whose vectors the prompt starts from, [P]; None: it starts at random."""
    if spec.init == "random":
        return None
    if spec.init == "sampled_vocabulary":
        return torch.randint(vocabulary, (spec.tokens,))
    assert spec.init_text is not None
    if tokenizer is None:
        raise UserError("adapter.init_text needs the model's tokenizer; give attach(model, spec, tokenizer=...)")
    ids = tokenizer(spec.init_text)["input_ids"]
    if not ids:
        raise UserError(f"adapter.init_text {spec.init_text!r} has no token; write a longer text")
    return torch.tensor([ids[i % len(ids)] for i in range(spec.tokens)])


def _token_vectors(model: NativeModel | ExternalModel, tokens: Tensor) -> Tensor:
    """Vectors of token ids [n] as the model reads them, [n, E]."""
    if isinstance(model, ExternalModel):
        return model.inner.get_input_embeddings()(tokens)
    return _reading_stack(model).token_vectors(tokens)


def _reading_stack(model: NativeModel) -> Transformer:
    """The stack that reads what a user writes: a decoder's or encoder's trunk, the encoder of an encoder-decoder."""
    name = "encoder" if isinstance(model, Seq2SeqModel | Seq2SeqClassifier) else "trunk"
    stack = model.get_submodule(name)
    assert isinstance(stack, Transformer)
    return stack


def prompt_width(model: NativeModel | ExternalModel) -> int:
    """Width of a token's vector, E.

    Raises:
        UserError: transformers' class for the model does not read vectors.
    """
    if isinstance(model, NativeModel):
        spec = _reading_stack(model).spec
        return spec.width if spec.projection is None else spec.projection.width
    if not accepts(model.inner, "inputs_embeds"):
        raise UserError(
            f"prompt tuning needs a model that reads vectors, and {type(model.inner).__name__} has no `inputs_embeds`; "
            "use LoRA instead"
        )
    with torch.no_grad():
        return _token_vectors(model, torch.zeros(1, dtype=torch.long, device=next(model.parameters()).device)).shape[-1]


def prompt_to_file(
    model: NativeModel | ExternalModel, state: dict[str, Tensor]
) -> "tuple[dict[str, Tensor], PeftConfig]":
    """Tensors and config of a soft prompt in peft's format; see `AdapterKind.to_file`."""
    from peft import PromptTuningConfig

    vectors = state["soft_prompt.embedding.weight"]
    config = PromptTuningConfig(
        num_virtual_tokens=len(vectors),
        token_dim=vectors.shape[1],
        num_transformer_submodules=1,  # an encoder-decoder's prompt stands before its source only
        num_attention_heads=1,  # peft asks for heads and layers, and does not use them
        num_layers=1,
    )
    return {"prompt_embeddings": vectors}, config


def read_prompt_spec(config: Mapping[str, object], directory: Path) -> PromptSpec:
    """The settings of a soft prompt in peft's format; how it began is not kept."""
    return build_spec(PromptSpec, {"tokens": config.get("num_virtual_tokens")}, f"{directory}/{CONFIG}")


def prompt_from_file(
    model: NativeModel | ExternalModel, spec: PromptSpec, tensors: dict[str, Tensor], directory: Path
) -> dict[str, Tensor | None]:
    """Attach a soft prompt and take its tensors out of the file's; see `AdapterKind.from_file`."""
    check_size(directory, spec.tokens * prompt_width(model), tensors)
    attach_prompt(model, spec)
    vectors = tensors.pop("prompt_embeddings", None)
    encoder_decoder = isinstance(model, Seq2SeqModel | Seq2SeqClassifier | ExternalSeq2SeqModel)
    if vectors is not None and encoder_decoder and len(vectors) == 2 * spec.tokens:
        vectors = vectors[: spec.tokens]  # peft draws as many for the decoder, and leaves them unused
    return {"soft_prompt.embedding.weight": vectors}
