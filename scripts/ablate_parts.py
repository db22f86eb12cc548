"""Parts of Narang et al. 2021 that the package does not have, as modules that take the place of a decoder's own.

Documents of these modules all have the same number of tokens, as `scripts/ablate.py` trains them. Each function at the
end changes a fresh model in place.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.models.language_model import LanguageModel
from alignment.models.layers.attention import Attention, AttentionContext

SOFTMAXES = 4


class Gained(nn.Module):
    """gain * part(x), the gain learned."""

    def __init__(self, part: nn.Module, gain: float):
        super().__init__()
        self.part, self.gain = part, nn.Parameter(torch.tensor(gain))

    def forward(self, x: Tensor, *context: AttentionContext) -> Tensor:
        return self.gain * self.part(x, *context)


class CausalConvolution(nn.Module):
    """output(convolution(glu(enter(x)))), a depthwise one whose weights are a softmax that the channels of a head share.

    Source: Wu et al. 2019, arXiv:1901.10430: lightweight, section 3; dynamic, where a token predicts the weights, section 4.
    """

    def __init__(self, width: int, heads: int, kernel: int, tokens: int, dynamic: bool):
        super().__init__()
        self.enter, self.output = _linear(width, 2 * width), _linear(width, width)
        self.scores = _linear(width, heads * kernel) if dynamic else None
        self.weight = None if dynamic else nn.Parameter(torch.zeros(heads, kernel))
        self.heads, self.kernel, self.tokens = heads, kernel, tokens

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        values = F.pad(F.glu(self.enter(x)).view(-1, self.tokens, x.shape[-1]), (0, 0, self.kernel - 1, 0))
        windows = values.unfold(1, self.kernel, 1).unflatten(2, (self.heads, -1)).flatten(0, 1)  # [N, H, K, kernel]
        scores = self.weight if self.scores is None else self.scores(x).unflatten(-1, (self.heads, self.kernel))
        mixed = windows @ scores.softmax(-1)[..., None]
        return self.output(context.needed(mixed.flatten(1)))


class Synthesizer(nn.Module):
    """softmax(scores) v, the scores predicted from the query's token alone (dense) or the same for all texts (random).

    Args:
        plus: "sum" adds the usual scores of queries and keys; "alpha" mixes both with a learned share.

    Source: Tay et al. 2020, arXiv:2005.00743, section 3; factorized: two vectors whose outer product is a dense row.
    """

    def __init__(
        self,
        attention: Attention,
        tokens: int,
        kind: Literal["dense", "factorized", "random"],
        plus: Literal["sum", "alpha"] | None = None,
    ):
        super().__init__()
        heads, width = attention.spec.heads, attention.value.in_features
        columns = {"dense": tokens, "factorized": 2 * round(tokens**0.5), "random": 0}[kind]
        self.dense = (
            nn.Sequential(_linear(width, width), nn.ReLU(), _linear(width, heads * columns)) if columns else None
        )
        self.random = None if columns else nn.Parameter(0.02 * torch.randn(heads, tokens, tokens))
        self.value, self.output, self.scale = attention.value, attention.output, attention.spec.scale
        self.query, self.key = (attention.query, attention.key) if plus else (None, None)
        self.alpha = nn.Parameter(torch.zeros(())) if plus == "alpha" else None
        self.heads, self.tokens, self.factorized = heads, tokens, kind == "factorized"

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        scores = self.random if self.dense is None else self._heads(self.dense(x))
        if self.factorized:
            rows, columns = scores.chunk(2, dim=-1)
            scores = (rows[..., None] * columns[..., None, :]).flatten(-2)[..., : self.tokens]
        if self.query is not None:
            share = None if self.alpha is None else self.alpha.sigmoid()
            usual = self.scale * self._heads(self.query(x)) @ self._heads(self.key(x)).mT
            scores = scores + usual if share is None else share * scores + (1 - share) * usual
        later = torch.ones(self.tokens, self.tokens, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ self._heads(self.value(x))
        return self.output(context.needed(mixed.transpose(1, 2).flatten(2).flatten(0, 1)))

    def _heads(self, x: Tensor) -> Tensor:
        """[B * T, H * K] -> [B, H, T, K]."""
        return x.view(-1, self.tokens, self.heads, x.shape[-1] // self.heads).transpose(1, 2)


class ProductKeys(nn.Module):
    """A memory in place of a feed-forward: the values of the `top` best of count^2 keys, each a pair of two halves.

    Source: Lample et al. 2019, arXiv:1907.05242, section 3. The values' own learning rate is left out.
    """

    def __init__(self, width: int, heads: int, count: int, top: int):
        super().__init__()
        half = width // 4
        self.query, self.norm = _linear(width, heads * 2 * half), nn.BatchNorm1d(heads * 2 * half)
        self.keys = nn.Parameter(half**-0.5 * torch.randn(2, heads, count, half))
        self.values = nn.EmbeddingBag(count**2, width, mode="sum")
        nn.init.normal_(self.values.weight, std=0.02)
        self.heads, self.count, self.top = heads, count, top

    def forward(self, x: Tensor) -> Tensor:
        query = self.norm(self.query(x)).view(len(x), self.heads, 2, -1)
        best, index = torch.einsum("nhsk,shck->nhsc", query, self.keys).topk(self.top)  # [N, H, 2, top]
        scores, pair = (best[:, :, 0, :, None] + best[:, :, 1, None]).flatten(2).topk(self.top)
        rows = index[:, :, 0].gather(-1, pair // self.top) * self.count + index[:, :, 1].gather(-1, pair % self.top)
        return self.values(rows.flatten(1), per_sample_weights=scores.softmax(-1).flatten(1))


class SoftmaxMixtureHead(nn.Module):
    """log sum_k share_k(x) softmax(W tanh(P_k x)), as logits. W is the head's own.

    Source: Yang et al. 2017, arXiv:1711.03953, section 2.3.
    """

    def __init__(self, head: nn.Linear, count: int):
        super().__init__()
        self.head, self.out_features, width = head, head.out_features, head.in_features
        self.project, self.share = _linear(width, count * width), _linear(width, count)

    def forward(self, x: Tensor) -> Tensor:
        states = self.project(x).tanh().unflatten(-1, (-1, x.shape[-1]))
        return (self.head(states).log_softmax(-1) + self.share(x).log_softmax(-1)[..., None]).logsumexp(-2)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)
    return layer


def add_gains(model: LanguageModel, gain: float, fixup: bool = False) -> None:
    """x + gain * part(x), matrices drawn as Glorot & Bengio do; ReZero's gain begins at 0.

    With `fixup` the last matrix of a part begins at 0 and the one before is divided by the root of the parts' number; the
    biases that Fixup adds are there already, for every layer has its own.

    Source: Bachlechner et al. 2020, arXiv:2003.04887, section 3; Zhang et al. 2019, arXiv:1901.09321, section 3.3.
    """
    blocks = model.trunk.blocks
    for block in blocks:
        for layer in (each for each in block.modules() if isinstance(each, nn.Linear)):
            nn.init.xavier_uniform_(layer.weight)
        if fixup:
            for layer in (block.attention.output, block.feedforward.down):
                nn.init.zeros_(layer.weight)
            for layer in (block.attention.value, block.feedforward.up):
                layer.weight.data *= (2 * len(blocks)) ** -0.5
        block.attention, block.feedforward = Gained(block.attention, gain), Gained(block.feedforward, gain)


def convolve(model: LanguageModel, dynamic: bool) -> None:
    """A convolution in place of each attention; kernels of 3, 7, 15 and 31 tokens, as in the paper."""
    for layer, block in enumerate(model.trunk.blocks):
        kernel, spec = min(31, 2 ** (layer + 2) - 1), model.spec
        block.attention = CausalConvolution(
            spec.width, spec.blocks[0].attention.heads, kernel, spec.max_positions, dynamic
        )


def synthesize(model: LanguageModel, kind: Literal["dense", "factorized", "random"], plus: str | None = None) -> None:
    """A synthesizer in place of each attention."""
    for block in model.trunk.blocks:
        block.attention = Synthesizer(block.attention, model.spec.max_positions, kind, plus)


def add_memory(model: LanguageModel) -> None:
    """A product-key memory of 1,024 values in place of the feed-forward of the middle layer."""
    blocks = model.trunk.blocks
    blocks[len(blocks) // 2].feedforward = ProductKeys(model.spec.width, heads=4, count=32, top=8)


def mix_softmaxes(model: LanguageModel) -> None:
    """Four softmaxes in place of one."""
    model.head = SoftmaxMixtureHead(model.head, SOFTMAXES)
