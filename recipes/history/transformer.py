"""This library's transformer in the place of each older system: it translates, and it classifies what it has read.

Source: Vaswani et al. 2017, arXiv:1706.03762.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.models.build import build_language_model
from alignment.models.classifiers import pooled
from alignment.models.outputs import from_padded
from alignment.pipeline.stages import load_stage_file

HERE = Path(__file__).parent
translation: Any = load_stage_file(HERE / "translation.py")
classification: Any = load_stage_file(HERE / "classification.py")
MASK = classification.reviews.MASK


class Translator(nn.Module):
    """T5's architecture: distances between symbols in place of positions.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1.
    """

    def __init__(self, vocabulary: int, width: int, *, layers: int = 2, heads: int = 4):
        super().__init__()
        self.model = build_language_model(
            {"model_type": "t5", "vocab_size": vocabulary, "d_model": width, "d_kv": width // heads, "d_ff": 2 * width,
             "num_layers": layers, "num_decoder_layers": layers, "num_heads": heads, "pad_token_id": 0,
             "decoder_start_token_id": 1, "relative_attention_max_distance": 32}
        )  # fmt: skip

    def forward(self, source: Tensor, before: Tensor) -> tuple[Tensor, None]:
        """Logits [B, T, V] of the symbols after `before` [B, T], and no alignment; 0 is padding."""
        return self.model(input_ids=source, attention_mask=source != 0, decoder_input_ids=before).logits, None


class Reader(nn.Module):
    """A language model, of the next word (Llama's architecture) or of masked words (ModernBERT's).

    Source: Radford et al. 2018 (GPT), section 3.1; Devlin et al. 2018, arXiv:1810.04805, section 3.1.
    """

    def __init__(self, vocabulary: int, width: int, kind: Literal["decoder", "encoder"], *, masked: float = 0.3):
        super().__init__()
        own = {"decoder": {"num_key_value_heads": 4}, "encoder": {"global_attn_every_n_layers": 1, "pad_token_id": 0}}[
            kind
        ]
        self.model = build_language_model(
            {"model_type": {"decoder": "llama", "encoder": "modernbert"}[kind], "vocab_size": vocabulary,
             "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4,
             "tie_word_embeddings": True, "max_position_embeddings": 128, "initializer_range": 0.1, **own}
        )  # fmt: skip
        self.kind, self.masked = kind, masked

    def loss(self, tokens: Tensor) -> Tensor:
        """Cross-entropy of the next word, or of the words that are masked, nats; 0 is padding."""
        if self.kind == "decoder":
            logits = self.model(input_ids=tokens, attention_mask=tokens != 0).logits[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)
        hidden = (torch.rand(tokens.shape) < self.masked) & (tokens != 0)
        logits = self.model(input_ids=tokens.masked_fill(hidden, MASK), attention_mask=tokens != 0).logits
        return F.cross_entropy(logits[hidden], tokens[hidden])


class ReaderClassifier(nn.Module):
    """A linear layer on the mean of a reader's states."""

    def __init__(self, reader: Reader, classes: int, width: int):
        super().__init__()
        self.reader, self.dropout, self.output = reader, nn.Dropout(0.2), nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of each text, [B, C]."""
        batch, model = from_padded(tokens, tokens != 0).batch, self.reader.model
        return self.output(self.dropout(pooled(model.hidden_states(model.trunk, batch), batch, "mean")))


def learn(corpus: Any, config: Any, kind: Literal["decoder", "encoder"]) -> dict[str, Any]:
    """The classifier from fresh weights, and from a reader's."""
    fresh, reader = (Reader(corpus.vocabulary, config.width, kind) for _ in range(2))
    loss = classification.read(reader, corpus, config)
    variants = {
        name: classification.fit(ReaderClassifier(each, 2, config.width), corpus, config)
        for name, each in (("fresh", fresh), ("pretrained", reader))
    }
    return {"variants": variants, "language_loss": loss}


def translate(config: translation.TranslationConfig) -> Path:
    """Train and judge the encoder-decoder on every task."""
    return translation.run(config, Translator)


def decoder(config: classification.ClassificationConfig) -> Path:
    """Train and judge the decoder."""
    return classification.run(config, lambda *given: learn(*given, "decoder"))


def encoder(config: classification.ClassificationConfig) -> Path:
    """Train and judge the encoder."""
    return classification.run(config, lambda *given: learn(*given, "encoder"))
