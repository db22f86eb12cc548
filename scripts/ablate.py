"""Train the same small decoder with one part exchanged at a time, and print what each costs and gains.

    python scripts/ablate.py [--rows vanilla swiglu rope] [--steps 2000] [--seeds 3] [--text FILE] [--output runs/ablate]
    python scripts/ablate.py --table efficient --tokens 128 --layers 2 --width 64 --batch 8 --steps 300 --learning-rate 3e-3

One text, character by character, its last tenth held out; the same windows in the same order, the same AdamW and the same
seeds in every row. Loss is nats per character on the held-out part, after an eighth of the steps and at the end, the mean
over seeds with their standard deviation. Operations are one forward's, per token, counted from the specification; steps/s is
one over the median step of this machine. Rows are written as they come, to ablation.json and ablation.md.
Nothing is tuned per row: a part that wants another learning rate looks worse here than it is.
The second table is of attention below quadratic cost; see ablate_efficient.py.

Source: the rows of Narang et al. 2021, arXiv:2102.11972, table 1; theirs are encoder-decoders. docs/evidence/ablation.md names
the rows that are not here. Parts that the package does not have are in ablate_parts.py.
"""

import argparse
import gzip
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ablate_parts as parts  # the neighbor in this folder
import torch
from torch import Tensor, nn

from alignment.analysis import forward_operations
from alignment.config.load import data_folder
from alignment.files import write_json, write_text
from alignment.models.init_weights import InitSpec, initialize
from alignment.models.language_model import LanguageModel
from alignment.models.layers import (
    AlibiSpec,
    AttentionSpec,
    BlockSpec,
    ExpertsSpec,
    GatedFeedForwardSpec,
    LayerNormSpec,
    LearnedPositionsSpec,
    NoNormSpec,
    PlainFeedForwardSpec,
    RelativeBiasSpec,
    RMSNormSpec,
    RotarySpec,
    SinusoidalPositionsSpec,
)
from alignment.models.transformer import ProjectionSpec, TransformerSpec
from alignment.ragged import Ragged
from alignment.training.optim import OptimConfig, build_optimizer, learning_rate_at

Change = Callable[[TransformerSpec], TransformerSpec]
Finish = Callable[[LanguageModel], None]
EVALUATED = 256  # documents of the held-out part, spread evenly; fewer where it is shorter


@dataclass(frozen=True)
class Settings:
    """What all rows have in common; shape and length of training are nanoGPT's for a CPU."""

    steps: int = 2000
    seeds: int = 3
    width: int = 128
    layers: int = 4
    batch: int = 12  # documents
    tokens: int = 64  # of a document
    learning_rate: float = 1e-3
    device: str = "cpu"

    @property
    def optim(self) -> OptimConfig:
        """AdamW and its schedule."""
        return OptimConfig(
            self.learning_rate, weight_decay=0.1, betas=(0.9, 0.99), warmup_steps=self.steps // 20,
            min_learning_rate_ratio=0.1,
        )  # fmt: skip


@dataclass(frozen=True)
class Corpus:
    """A text as numbers of its characters: what is trained on, and documents held out."""

    training: Tensor
    held_out: list[list[int]]
    vocabulary: int


@dataclass(frozen=True)
class Result:
    """One row of the table; a value per seed where there are several."""

    name: str
    label: str
    parameters: int
    operations_per_token: float | None  # None: of a part that the package does not count
    steps_per_second: list[float] = field(default_factory=list)
    early_loss: list[float] = field(default_factory=list)
    final_loss: list[float] = field(default_factory=list)


def main() -> None:
    arguments, settings = read_arguments()
    if arguments.table == "efficient":
        from ablate_efficient import run  # imports this module

        return run(arguments.rows, settings, arguments.output)
    data = arguments.text.read_bytes()
    text = (gzip.decompress(data) if arguments.text.suffix == ".gz" else data).decode("utf-8")
    corpus = corpus_of(text, settings.tokens)
    held_out = sum(map(len, corpus.held_out)) - len(corpus.held_out)
    print(f"{len(corpus.training)} characters to train on, {held_out} to predict held out, {corpus.vocabulary} kinds")
    results: list[Result] = []
    for name in arguments.rows:
        results.append(measure(name, corpus, settings))
        print(" | ".join(cells(results[-1], results[0])), flush=True)
        about = {"text": str(arguments.text), "characters": len(corpus.training), "held_out": held_out}
        about |= {**asdict(settings), "optim": asdict(settings.optim)}
        found = {"settings": about, "rows": [summary(result) for result in results]}
        write_json(arguments.output / "ablation.json", found)
        write_text(arguments.output / "ablation.md", table(results))
    print("\n" + table(results))


def read_arguments() -> tuple[argparse.Namespace, Settings]:
    """The command line, checked."""
    usual = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=data_folder() / "tinyshakespeare" / "train.txt.gz")
    parser.add_argument("--table", choices=list(TABLES), default="narang")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help=f"of the table: {TABLES}")
    for name in ("steps", "seeds", "width", "layers", "batch", "tokens"):
        parser.add_argument(f"--{name}", type=int, default=getattr(usual, name))
    parser.add_argument("--learning-rate", type=float, default=usual.learning_rate)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("runs/ablate"))
    arguments = parser.parse_args()
    known = TABLES[arguments.table]
    arguments.rows = arguments.rows or list(known)
    if wrong := set(arguments.rows) - set(known):
        parser.error(f"--rows {' '.join(sorted(wrong))}: the rows of this table are {', '.join(known)}")
    settings = Settings(**{name: getattr(arguments, name) for name in Settings.__dataclass_fields__})
    if min(settings.steps, settings.seeds, settings.batch) < 1 or settings.tokens < 8:
        parser.error("--steps, --seeds and --batch must be at least 1, --tokens at least 8")
    if settings.layers < 2 or settings.layers % 2:
        parser.error(f"--layers {settings.layers}: give an even number, for one row halves it")
    if settings.width < 32 or settings.width % (2 * heads_of(settings.width)):
        parser.error(f"--width {settings.width}: give at least 32, a multiple of {2 * heads_of(settings.width)}")
    if arguments.table == "narang" and not arguments.text.is_file():
        parser.error(f"{arguments.text} is not there; set ALIGNMENT_DATA, or give --text FILE")
    return arguments, settings


def corpus_of(text: str, tokens: int) -> Corpus:
    """The first nine tenths to train on; of the last tenth whole documents of `tokens`, at most 256, spread evenly."""
    characters = {character: number for number, character in enumerate(sorted(set(text)))}
    ids = torch.tensor([characters[character] for character in text])
    cut = len(ids) * 9 // 10
    training, rest = ids[:cut], ids[cut:]
    count = len(rest) // tokens
    if count < 1 or len(training) <= tokens:
        raise SystemExit(f"the text has {len(text)} characters; its last tenth must hold {tokens}")
    chosen = torch.linspace(0, count - 1, min(count, EVALUATED)).long()
    return Corpus(training, rest[: count * tokens].view(count, tokens)[chosen].tolist(), len(characters))


def measure(name: str, corpus: Corpus, settings: Settings) -> Result:
    """One row of the table: the same training once per seed."""
    row = ROWS[name]
    spec = row.change(vanilla(corpus.vocabulary, settings.width, settings.layers, settings.tokens))
    parameters = sum(parameter.numel() for parameter in build(spec, 0, row.finish).parameters())
    operations = forward_operations(spec, settings.tokens) if row.finish is None else None
    result = Result(name, row.label, parameters, operations)
    for seed in range(settings.seeds):
        speed, early, final = train(build(spec, seed, row.finish), corpus, settings, seed)
        result.steps_per_second.append(speed)
        result.early_loss.append(early)
        result.final_loss.append(final)
    return result


def build(spec: TransformerSpec, seed: int, finish: Finish | None = None) -> LanguageModel:
    """The decoder `spec` describes, with fresh weights; `finish` then exchanges parts of it."""
    torch.manual_seed(seed)
    head = nn.Linear(spec.output_width or spec.width, spec.vocabulary, bias=False)
    model = initialize(LanguageModel(spec.build(), head, config={}))
    if finish is not None:
        finish(model)
    return model.eval()


def train(model: LanguageModel, corpus: Corpus, settings: Settings, seed: int) -> tuple[float, float, float]:
    """Steps a second (by the median step), held-out loss after an eighth of the steps, and at the end."""
    model = model.to(settings.device)
    optimizer = build_optimizer(model, settings.optim)
    seconds, early, early_step = [], float("nan"), max(1, settings.steps // 8)
    for step, batch in enumerate(batches(corpus.training, settings, seed), 1):
        began = time.perf_counter()
        update(model, optimizer, batch.to(settings.device), learning_rate_at(step, settings.optim, settings.steps))
        if settings.device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        if step == early_step:
            early = held_out_loss(model, corpus, settings)
    return 1 / statistics.median(seconds), early, held_out_loss(model, corpus, settings)


def batches(training: Tensor, settings: Settings, seed: int) -> Iterator[Ragged]:
    """Windows at random places, the same for every row."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.steps):
        places = torch.randint(len(training) - settings.tokens + 1, (settings.batch,), generator=generator)
        yield Ragged.build([training[place : place + settings.tokens].tolist() for place in places.tolist()])


def update(model: LanguageModel, optimizer: torch.optim.Optimizer, batch: Ragged, learning_rate: float) -> None:
    """One step of AdamW on the mean loss of a batch."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    output = model.train()(batch=batch)
    loss = -output.log_probs.mean()
    loss = loss if output.balance is None else loss + output.balance
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def held_out_loss(model: LanguageModel, corpus: Corpus, settings: Settings) -> float:
    """Mean over the held-out characters, nats, without what balances experts."""
    model.eval()
    rows, total, count = corpus.held_out, 0.0, 0
    for start in range(0, len(rows), settings.batch):
        log_probs = model(batch=Ragged.build(rows[start : start + settings.batch]).to(settings.device)).log_probs
        total, count = total - log_probs.double().sum().item(), count + len(log_probs)
    return total / count


COLUMNS = ("row", "parameters", "operations/token", "steps/s", "early loss", "final loss", "beside row 1")


def cells(result: Result, baseline: Result) -> list[str]:
    """The row of the table; `baseline` is the one its final loss is compared with."""
    operations = result.operations_per_token
    return [
        result.label,
        f"{result.parameters:,}",
        "–" if operations is None else f"{operations:,.0f}",
        f"{statistics.mean(result.steps_per_second):.1f}",
        spread(result.early_loss),
        spread(result.final_loss),
        difference(result.final_loss, baseline.final_loss),
    ]


def difference(values: Sequence[float], baseline: Sequence[float]) -> str:
    """Mean minus the baseline's mean; in brackets where it is no more than the two standard deviations together."""
    if values is baseline:
        return ""
    gap = statistics.mean(values) - statistics.mean(baseline)
    within = len(values) > 1 and abs(gap) <= statistics.stdev(values) + statistics.stdev(baseline)
    return f"({gap:+.4f})" if within else f"{gap:+.4f}"


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds; the mean alone where there is one."""
    mean = f"{statistics.mean(values):.4f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.4f}"


def table(results: Sequence[Result]) -> str:
    """All rows in markdown; the first one is the baseline."""
    head = [f"| {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    return "\n".join([*head, *(f"| {' | '.join(cells(result, results[0]))} |" for result in results)]) + "\n"


def summary(result: Result) -> dict[str, Any]:
    """A row as JSON: every seed's value, their mean and standard deviation (null for one seed)."""
    kept = asdict(result)
    for name in ("steps_per_second", "early_loss", "final_loss"):
        values = kept[name]
        std = statistics.stdev(values) if len(values) > 1 else None
        kept[name] = {"mean": statistics.mean(values), "std": std, "seeds": values}
    return kept


# The rows


def vanilla(vocabulary: int, width: int, layers: int, tokens: int) -> TransformerSpec:
    """The baseline: ReLU, learned positions, LayerNorm before each part, every head its own keys, tied embeddings.

    Args:
        vocabulary: different characters.
        width: D; there are max(4, D / 64) heads.
        layers: even, for rows that halve or double them.
        tokens: longest document.
    """
    heads = heads_of(width)
    head_dim = width // heads
    attention = AttentionSpec(heads, heads, head_dim, head_dim**-0.5, bias=True, output_bias=True)
    block = BlockSpec(attention, PlainFeedForwardSpec(4 * width, "relu", bias=True), LayerNormSpec(1e-5))
    init = InitSpec(std=0.02, residual_std=0.02 / (2 * layers) ** 0.5)
    options: dict[str, Any] = {"tied_head": True, "positions": LearnedPositionsSpec(tokens)}
    return TransformerSpec(vocabulary, width, tokens, (block,) * layers, LayerNormSpec(1e-5), init, **options)


def heads_of(width: int) -> int:
    """Heads of the baseline."""
    return max(4, width // 64)


def _change_blocks(spec: TransformerSpec, **changes: Any) -> TransformerSpec:
    return replace(spec, blocks=tuple(replace(block, **changes) for block in spec.blocks))


def _attention(spec: TransformerSpec, **changes: Any) -> TransformerSpec:
    return _change_blocks(spec, attention=replace(spec.blocks[0].attention, **changes))


def _activation(spec: TransformerSpec, name: str) -> TransformerSpec:
    return _change_blocks(spec, feedforward=replace(_plain(spec), activation=name))


def _gated(spec: TransformerSpec, gate: str) -> TransformerSpec:
    """Three matrices for two: two thirds of the width, to the next 8, keep the parameters.

    Source: Shazeer 2020, arXiv:2002.05202, section 3.
    """
    width = 8 * round(_plain(spec).width * 2 / 3 / 8)
    return _change_blocks(spec, feedforward=GatedFeedForwardSpec(width, gate, bias=True))


def _plain(spec: TransformerSpec) -> PlainFeedForwardSpec:
    feedforward = spec.blocks[0].feedforward
    assert isinstance(feedforward, PlainFeedForwardSpec)
    return feedforward


def _experts(spec: TransformerSpec, experts_per_token: int) -> TransformerSpec:
    """Four feed-forwards as wide as the one they replace; two of them chosen as in Mixtral, or one as in Switch."""
    experts = ExpertsSpec(
        _plain(spec), count=4, experts_per_token=experts_per_token, normalized=experts_per_token > 1, balance_coef=0.01
    )
    return _change_blocks(spec, feedforward=experts)


def _rms_norm(spec: TransformerSpec) -> TransformerSpec:
    norm = RMSNormSpec(1e-5)
    return replace(_change_blocks(spec, norm=norm), norm=norm)


def _same(spec: TransformerSpec) -> TransformerSpec:
    return spec


def _no_norm(spec: TransformerSpec) -> TransformerSpec:
    """With the embeddings scaled, for no norm does it."""
    changed = _change_blocks(spec, norm=NoNormSpec())
    return replace(changed, norm=NoNormSpec(), embedding_scale=spec.width**0.5)


def _shared(spec: TransformerSpec) -> TransformerSpec:
    return replace(spec, blocks=spec.blocks[:1], order=(0,) * len(spec.blocks))


def _post_norm(spec: TransformerSpec) -> TransformerSpec:
    return replace(_change_blocks(spec, wiring="post"), norm=NoNormSpec())  # the last block ends with a norm already


def _sinusoidal(spec: TransformerSpec) -> TransformerSpec:
    """With the embeddings scaled as its authors do: fresh ones would be lost beside sines.

    Source: Vaswani et al. 2017, arXiv:1706.03762, sections 3.4 and 3.5.
    """
    return replace(spec, positions=SinusoidalPositionsSpec(), embedding_scale=spec.width**0.5)


def _rotary(spec: TransformerSpec) -> TransformerSpec:
    rotary = RotarySpec(10_000.0, spec.width // heads_of(spec.width))
    return replace(_attention(spec, rotary=rotary), positions=None)


def _position_bias(spec: TransformerSpec, bias: AlibiSpec | RelativeBiasSpec) -> TransformerSpec:
    return replace(_attention(spec, position_bias=bias), positions=None)


def _key_heads(spec: TransformerSpec, sharing: int) -> TransformerSpec:
    """`sharing` query heads to a key head; 0: all to one."""
    heads = heads_of(spec.width)
    return _attention(spec, key_value_heads=heads // sharing if sharing else 1)


def _factorised(spec: TransformerSpec) -> TransformerSpec:
    narrow = spec.width // 4
    return replace(spec, projection=ProjectionSpec(narrow, bias=False, before_positions=True), output_width=narrow)


def _reshaped(spec: TransformerSpec, share: float) -> TransformerSpec:
    """Another depth at the same parameters: heads and feed-forward are `share` of what they were, D stays."""
    heads, layers = round(heads_of(spec.width) * share), round(len(spec.blocks) / share)
    block = spec.blocks[0]
    attention = replace(block.attention, heads=heads, key_value_heads=heads)
    changed = replace(
        block, attention=attention, feedforward=replace(_plain(spec), width=round(_plain(spec).width * share))
    )
    init = InitSpec(std=0.02, residual_std=0.02 / (2 * layers) ** 0.5)
    return replace(spec, blocks=(changed,) * layers, init=init)


class Row(NamedTuple):
    """A row's label, what it makes of vanilla's specification, and of the fresh model where the package lacks the part."""

    label: str
    change: Change
    finish: Finish | None = None


ROWS: dict[str, Row] = {
    "vanilla": Row("Vanilla (ReLU, learned positions, LayerNorm, pre-norm, tied)", _same),
    "gelu": Row("GELU", partial(_activation, name="gelu")),
    "swish": Row("Swish (SiLU)", partial(_activation, name="silu")),
    "elu": Row("ELU", partial(_activation, name="elu")),
    "selu": Row("SELU", partial(_activation, name="selu")),
    "sigmoid": Row("Sigmoid", partial(_activation, name="sigmoid")),
    "softplus": Row("Softplus", partial(_activation, name="softplus")),
    "glu": Row("GLU", partial(_gated, gate="sigmoid")),
    "reglu": Row("ReGLU", partial(_gated, gate="relu")),
    "geglu": Row("GeGLU", partial(_gated, gate="gelu")),
    "swiglu": Row("SwiGLU", partial(_gated, gate="silu")),
    "liglu": Row("LiGLU (bilinear)", partial(_gated, gate="linear")),
    "rmsnorm": Row("RMSNorm", _rms_norm),
    "rezero": Row("ReZero", _no_norm, partial(parts.add_gains, gain=0.0)),
    "rezero-layernorm": Row("ReZero + LayerNorm", _same, partial(parts.add_gains, gain=0.0)),
    "rezero-rmsnorm": Row("ReZero + RMSNorm", _rms_norm, partial(parts.add_gains, gain=0.0)),
    "fixup": Row("Fixup", _no_norm, partial(parts.add_gains, gain=1.0, fixup=True)),
    "post-norm": Row("Post-norm", _post_norm),
    "sandwich": Row("Sandwich norm", partial(_change_blocks, wiring="sandwich")),
    "parallel": Row("Parallel block", partial(_change_blocks, wiring="parallel")),
    "sinusoidal": Row("Sinusoidal positions", _sinusoidal),
    "rope": Row("Rotary positions", _rotary),
    "alibi": Row("ALiBi", partial(_position_bias, bias=AlibiSpec())),
    "t5-bias": Row("T5 relative bias", partial(_position_bias, bias=RelativeBiasSpec(32, 128))),
    "grouped-query": Row("Grouped-query attention (2 heads to a key)", partial(_key_heads, sharing=2)),
    "multi-query": Row("Multi-query attention", partial(_key_heads, sharing=0)),
    "window": Row(
        "Sliding window (a quarter of the document)",
        lambda spec: _attention(spec, window=max(2, spec.max_positions // 4)),
    ),
    "shared": Row("Shared layers (ALBERT)", _shared),
    "factorised": Row("Factorised embeddings (D / 4)", _factorised),
    "factorised-untied": Row("Factorised, untied", lambda spec: replace(_factorised(spec), tied_head=False)),
    "shared-factorised": Row("Shared layers, factorised embeddings", lambda spec: _factorised(_shared(spec))),
    "untied": Row("Untied embeddings", lambda spec: replace(spec, tied_head=False)),
    "moe": Row("Mixture of experts (2 of 4)", partial(_experts, experts_per_token=2)),
    "switch": Row("Switch (1 of 4)", partial(_experts, experts_per_token=1)),
    "deeper": Row("Twice the layers, half their heads and width", partial(_reshaped, share=0.5)),
    "shallower": Row("Half the layers, twice their heads and width", partial(_reshaped, share=2.0)),
    "softmaxes": Row("Mixture of softmaxes (4)", _same, parts.mix_softmaxes),
    "lightweight": Row("Lightweight convolution", _same, partial(parts.convolve, dynamic=False)),
    "dynamic": Row("Dynamic convolution", _same, partial(parts.convolve, dynamic=True)),
    "dense": Row("Synthesizer, dense", _same, partial(parts.synthesize, kind="dense")),
    "dense-plus": Row("Synthesizer, dense plus", _same, partial(parts.synthesize, kind="dense", plus="sum")),
    "dense-alpha": Row("Synthesizer, dense plus alpha", _same, partial(parts.synthesize, kind="dense", plus="alpha")),
    "factorized": Row("Synthesizer, factorized", _same, partial(parts.synthesize, kind="factorized")),
    "random": Row("Synthesizer, random", _same, partial(parts.synthesize, kind="random")),
    "random-plus": Row("Synthesizer, random plus", _same, partial(parts.synthesize, kind="random", plus="sum")),
    "random-alpha": Row(
        "Synthesizer, random plus alpha", _same, partial(parts.synthesize, kind="random", plus="alpha")
    ),
    "product-keys": Row("Product-key memory in one layer", _same, parts.add_memory),
}
TABLES = {
    "narang": tuple(ROWS),
    "efficient": ("full", "unfused", "window", "linformer", "performer", "nystrom", "lsh", "bigbird"),
}

if __name__ == "__main__":
    main()
