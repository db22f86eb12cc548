"""Settings of adapters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Interval

from alignment.settings import NonNegativeInt, PositiveFloat, Rule, Settings, compile_pattern, refusal

MAX_SIZE = 65_536  # a larger rank or prefix is a typing error and would need terabytes
# Every expert of a mixture, but not its router.
EVERY_LINEAR = r"(attention|cross)\.(query|key|value|output)|feedforward\.(experts\.\d+\.)?(gate|up|down)"
IA3_OUTPUTS = r"(attention|cross)\.(key|value)"
IA3_INPUTS = r"feedforward\.down"

Size = Annotated[int, Interval(ge=1, le=MAX_SIZE)]
Dropout = Annotated[float, Interval(ge=0, lt=1)]
Names = str | tuple[str, ...]  # a regular expression, or a list of names


def _pattern_problem(names: Names | Mapping[str, float]) -> str:
    """The fault of regular expressions; '' without one."""
    problems = (refusal(compile_pattern, name) for name in ([names] if isinstance(names, str) else names))
    return next(filter(None, problems), "")


def _patterns(*keys: str) -> tuple[Rule, ...]:
    return tuple(Rule(key, lambda c, key=key: _pattern_problem(getattr(c, key))) for key in keys)


@dataclass(frozen=True)
class LowRankSpec(Settings):
    """The settings of LoRA and DoRA.

    Attributes:
        rank: rank of the update, r; 8 to 64 is usual.
        alpha: scale; the update is multiplied by alpha / rank, or by alpha / sqrt(rank) with `rank_stabilized`; twice
            the rank is usual.
        dropout: dropout on the update's input in training.
        layers: the linear layers: `all-linear`; or a regular expression that matches the end of their names, such as
            `attention\\.(query|value)`; or a list of such ends. Names are ours, or those of transformers (`q_proj`).
        rank_stabilized: use rsLoRA's scale.
        rank_pattern, alpha_pattern: other ranks and alphas by the end of the layer's name (a regular expression).
        init: how the update starts. `default`: Kaiming for A, zeros for B; `pissa`: the principal singular vectors of
            the layer's weight.
        token_rows: ids of tokens whose rows of the embedding (and of a language head tied to it) are trained too.
        modules_to_save: further modules that are trained whole and saved, such as `lm_head` or `embed_tokens`.
    """

    rank: Size = 16
    alpha: PositiveFloat = 32.0
    dropout: Dropout = 0.0
    layers: Names = EVERY_LINEAR
    rank_stabilized: bool = False
    rank_pattern: Mapping[str, Size] = field(default_factory=dict)
    alpha_pattern: Mapping[str, PositiveFloat] = field(default_factory=dict)
    init: Literal["default", "pissa"] = "default"
    token_rows: tuple[NonNegativeInt, ...] = ()
    modules_to_save: tuple[str, ...] = ()

    RULES = (
        *_patterns("layers", "rank_pattern", "alpha_pattern"),
        Rule(
            "token_rows",
            lambda c: len(set(c.token_rows)) < len(c.token_rows),
            "must be different tokens, got {self.token_rows}",
        ),
    )


@dataclass(frozen=True)
class LoRASpec(LowRankSpec):
    """Low-rank updates of frozen linear layers: W x + (alpha / rank) B A x. Keys: see `LowRankSpec`.

    Source: Hu et al. 2021, arXiv:2106.09685; rsLoRA Kalajdzievski 2023, arXiv:2312.03732; PiSSA Meng et al. 2024,
    arXiv:2404.02948.
    """

    kind: Literal["lora"] = "lora"


@dataclass(frozen=True)
class DoRASpec(LowRankSpec):
    """LoRA with a trained length per output: m (W + (alpha / rank) B A) x / |W + (alpha / rank) B A|, |.| by row of W.

    The length counts as a constant in the backward pass. Keys: see `LowRankSpec`.

    Source: Liu et al. 2024, arXiv:2402.09353, equation 5; section 4.3 for the constant.
    """

    kind: Literal["dora"] = "dora"

    RULES = (Rule("init", lambda c: c.init == "pissa", "pissa is not there for dora; use kind: lora, or leave it out"),)


@dataclass(frozen=True)
class IA3Spec(Settings):
    """Trained factors on the keys, the values and the hidden units of the feed-forward, one per feature.

    Attributes:
        layers: the linear layers with a factor per output, written as for LoRA.
        feedforward: those with a factor per input instead, the last layer of each feed-forward; `layers` need not name
            them again. Files hold none for experts, so that the default leaves these as they are.
        modules_to_save: as for LoRA.

    Source: Liu et al. 2022, arXiv:2205.05638, section 3.3.
    """

    kind: Literal["ia3"] = "ia3"
    layers: Names = IA3_OUTPUTS
    feedforward: Names = IA3_INPUTS
    modules_to_save: tuple[str, ...] = ()

    RULES = _patterns("layers", "feedforward")


@dataclass(frozen=True)
class PrefixSpec(Settings):
    """Trained keys and values before every document in every layer of a frozen model.

    Attributes:
        tokens: number of virtual tokens; 10 to 100 is usual.
        projection_width: hidden width of the two-layer network that computes the prefix in training; 0: no network.

    Source: Li and Liang 2021, arXiv:2101.00190.
    """

    kind: Literal["prefix"] = "prefix"
    tokens: Size = 16
    projection_width: Annotated[int, Interval(ge=0, le=MAX_SIZE)] = 0


@dataclass(frozen=True)
class PromptSpec(Settings):
    """Trained vectors that a frozen model reads as the first tokens of every document (of an encoder-decoder's source).

    Attributes:
        tokens: number of virtual tokens; 10 to 100 is usual.
        init_text: the vectors start as those of its tokens, cut or repeated; None: from N(0, 1).

    Source: Lester et al. 2021, arXiv:2104.08691.
    """

    kind: Literal["prompt"] = "prompt"
    tokens: Size = 20
    init_text: str | None = None


@dataclass(frozen=True)
class BottleneckSpec(Settings):
    """Small residual networks on the outputs of a frozen model's layers: x + up(activation(down(x))).

    peft has no such adapters, so that the saved files are in a format of this library's own.

    Attributes:
        width: columns that `down` projects to, 16 to 256 as a rule; None: the model's width divided by
            `reduction_factor`.
        reduction_factor: see `width`.
        placement: `houlsby`: after attention and after the feed-forward layer; `pfeiffer`: after the feed-forward
            layer.
        activation: relu, gelu, silu or tanh.
        dropout: dropout on the input of `up` in training.

    Source: Houlsby et al. 2019, arXiv:1902.00751; Pfeiffer et al. 2021, arXiv:2005.00247, section 2.2.2.
    """

    kind: Literal["bottleneck"] = "bottleneck"
    width: Size | None = None
    reduction_factor: Annotated[float, Ge(1)] = 16.0
    placement: Literal["houlsby", "pfeiffer"] = "pfeiffer"
    activation: Literal["relu", "gelu", "silu", "tanh"] = "relu"
    dropout: Dropout = 0.0

    def inner_width(self, model_width: int) -> int:
        """Columns that `down` projects to in a model of this width, at least 1."""
        return self.width or max(1, int(model_width / self.reduction_factor))


UNMERGEABLE = (PrefixSpec, PromptSpec, BottleneckSpec)  # no change of weights
MergeableSpec = LoRASpec | DoRASpec | IA3Spec  # changes of weights
AdapterSpec = LoRASpec | DoRASpec | IA3Spec | PrefixSpec | PromptSpec | BottleneckSpec


def refuse_new_tokens(adapter: AdapterSpec | None, tokens: Sequence[str]) -> None:
    """Raise UserError for `add_tokens` with an adapter: its base is frozen."""
    if adapter is not None and tokens:
        raise ValueError(
            f"add_tokens: an adapter's base has no row for {', '.join(tokens)}; write a base that has (`alignment "
            "export --model ... --add-token ... --output DIR`), start from it, and name the tokens' ids in "
            "adapter.token_rows"
        )


def refuse_dropout(adapter: AdapterSpec | None, stage: str) -> None:
    """Refuse adapter dropout in stages that compare the policy with its reference token by token, without dropout."""
    dropout = getattr(adapter, "dropout", 0.0)  # of the kinds that have one
    if dropout > 0:
        raise ValueError(
            f"adapter.dropout must be 0 in {stage}, got {dropout}: dropout is off there, so that policy and "
            "reference start equal"
        )
