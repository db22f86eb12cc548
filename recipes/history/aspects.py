"""Attention pooling with one map per task: what guests say of each aspect of a hotel, and where they say it: a stage.

The encoder is this library's; each aspect has a map over its states and a head of its own. Nobody tells a map where its
sentence stands. Beside it the same model with one map for all aspects.

Source: Lin et al. 2017, arXiv:1703.03130, section 2: A = softmax(W_s2 tanh(W_s1 H)); here each row of A has its own task.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.files import write_json
from alignment.models.build import build_language_model
from alignment.models.outputs import from_padded
from alignment.pipeline.stages import load_stage_file
from alignment.settings import NonNegativeInt, PositiveFloat, PositiveInt, Settings
from alignment.statistics.winrate import win_rate

HERE = Path(__file__).parent
classification: Any = load_stage_file(HERE / "classification.py")
reviews, descent = classification.reviews, classification.descent
SAID = ("nothing", "bad", "good")  # of an aspect; the classes of each head


@dataclass(frozen=True)
class AspectsConfig(Settings):
    """Settings of both models.

    Attributes:
        output: directory of `results.json` and `maps.png`.
        width: of the encoder.
        held_out: reviews to judge on.
        steps, batch_size, learning_rate, seed: of the training; its reviews are new in every step.
    """

    output: str
    width: PositiveInt = 48
    held_out: PositiveInt = 300
    steps: PositiveInt = 400
    batch_size: PositiveInt = 48
    learning_rate: PositiveFloat = 5e-3
    seed: NonNegativeInt = 0


class AttentionPooling(nn.Module):
    """Weights softmax(W_s2 tanh(W_s1 h)) over a text's words, a row for each map, and the weighted sums."""

    def __init__(self, width: int, maps: int):
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False)  # W_s1
        self.maps = nn.Linear(width, maps, bias=False)  # W_s2

    def forward(self, states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """states [B, T, D], mask [B, T] -> vectors [B, M, D] and weights [B, M, T]."""
        scores = self.maps(torch.tanh(self.inner(states))).masked_fill(~mask[..., None], -torch.inf)
        weights = scores.softmax(1).transpose(1, 2)
        return weights @ states, weights


class AspectModel(nn.Module):
    """Encoder, maps, and a head for each aspect; with `shared` one map that all heads read."""

    def __init__(self, vocabulary: int, aspects: int, width: int, *, shared: bool = False):
        super().__init__()
        self.encoder = build_language_model(
            {"model_type": "bert", "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 2 * width,
             "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.1}
        ).trunk  # fmt: skip
        self.pooling = AttentionPooling(width, 1 if shared else aspects)
        self.heads = nn.ModuleList(nn.Linear(width, len(SAID)) for _ in range(aspects))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of each aspect [B, A, 3] and its map [B, A, T]; 0 is padding."""
        padded = from_padded(tokens, tokens != 0)
        vectors, maps = self.pooling(padded.restore(self.encoder(padded.batch)), tokens != 0)
        vectors, maps = (x.expand(-1, len(self.heads), -1) for x in (vectors, maps))
        return torch.stack([head(vectors[:, number]) for number, head in enumerate(self.heads)], 1), maps


class Told(NamedTuple):
    """Reviews as word numbers [B, T], what each says of each aspect [B, A], and True in the aspect's sentence [B, A, T]."""

    tokens: Tensor
    said: Tensor
    sentence: Tensor


def write_batch(rng: Random, vocabulary: Any, count: int) -> Told:
    """Reviews whose opinions are independent of each other: one aspect says nothing of another."""
    rows = [reviews.write_review(rng, agreement=0.5) for _ in range(count)]
    tokens = classification.pad([torch.tensor(vocabulary.encode(row.words)) for row in rows])
    said = torch.zeros(count, len(reviews.TOPICS), dtype=torch.long)
    sentence = torch.zeros(count, len(reviews.TOPICS), tokens.shape[1], dtype=torch.bool)
    for number, row in enumerate(rows):
        for topic, (polarity, first, end) in row.opinions.items():
            aspect = reviews.TOPICS.index(topic)
            said[number, aspect] = 1 + polarity
            sentence[number, aspect, 1 + first : 1 + end] = True  # behind START
    return Told(tokens, said, sentence)


def run(config: AspectsConfig) -> Path:
    """Train and judge both models; write `results.json` and return its path."""
    rng = Random(f"{config.seed}/vocabulary")
    vocabulary = reviews.Vocabulary([reviews.write_review(rng).words for _ in range(2000)])
    held_out = write_batch(Random(f"{config.seed}/held out"), vocabulary, config.held_out)
    results: dict[str, Any] = {}
    for name, shared in (("one_map_per_aspect", False), ("one_map_for_all", True)):
        torch.manual_seed(config.seed)
        model = AspectModel(len(vocabulary), len(reviews.TOPICS), config.width, shared=shared)
        started = time.process_time()
        train(model, vocabulary, config)
        seconds = time.process_time() - started
        with torch.no_grad():
            logits, maps = model.eval()(held_out.tokens)
        results[name] = judge(logits, maps, held_out)
        results[name] |= {"parameters": descent.parameter_count(model), "seconds": seconds}
        if not shared:
            draw(Path(config.output) / "maps.png", vocabulary, held_out, maps)
    write_json(Path(config.output) / "results.json", results)
    return Path(config.output) / "results.json"


def train(model: nn.Module, vocabulary: Any, config: AspectsConfig) -> None:
    """The sum of the cross-entropies of all heads, on new reviews in every step."""
    rng = Random(f"{config.seed}/training")

    def loss_of(_: int) -> Tensor:
        batch = write_batch(rng, vocabulary, config.batch_size)
        return F.cross_entropy(model(batch.tokens)[0].flatten(0, 1), batch.said.flatten())

    model.train()
    descent.descend(loss_of, [{"params": model.parameters()}], config.steps, learning_rate=config.learning_rate)


def judge(logits: Tensor, maps: Tensor, told: Told) -> dict[str, Any]:
    """Of the aspects that a review speaks of: share whose polarity is found, and of the map's mass in the right sentence.

    `uniform_share` is what equal weights put there.
    """
    spoken = told.said > 0
    right = (logits.argmax(-1) == told.said)[spoken]
    uniform = told.sentence.sum(-1) / (told.tokens != 0).sum(1)[:, None]
    return {
        "polarity": asdict(win_rate(right.float().tolist())),
        "map_share": float((maps * told.sentence).sum(-1)[spoken].mean()),
        "uniform_share": float(uniform[spoken].mean()),
    }


def draw(path: Path, vocabulary: Any, told: Told, maps: Tensor) -> None:
    """The maps of the aspects that the first review speaks of, over its words."""
    words = [vocabulary.words[number] for number in told.tokens[0].tolist() if number]
    spoken = told.said[0].nonzero().flatten().tolist()
    with mpl.rc_context({"font.size": 9}):
        figure = Figure(figsize=(0.34 * len(words), 1.4 + 0.3 * len(spoken)), layout="constrained")
        axes = figure.subplots()
        axes.imshow(maps[0, spoken, : len(words)].numpy(), cmap="gray_r", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(words)), words, rotation=60, ha="right")
        axes.set_yticks(range(len(spoken)), [f"{reviews.TOPICS[each]}: {SAID[told.said[0, each]]}" for each in spoken])
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=90)
