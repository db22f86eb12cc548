"""A reward model and its tokenizer: texts, prompts with responses, and steps in; scores out.

Beside the weights lie the scale of the scores and the scores of canaries. Loading is in load.py.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from alignment.data.encoder_inputs import encode_prompts_with_responses
from alignment.data.rows.records import Messages, Steps
from alignment.data.text.chat import encode_response, prompt_ids, texts_ids
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.files import read_json_object, write_json
from alignment.loading import same_vocabulary
from alignment.models.activation_checkpointing import Keep
from alignment.models.classifiers import ScalarModel
from alignment.models.encoder_decoder import DocumentClassifier
from alignment.models.external.models import ExternalScalarModel
from alignment.models.outputs import ClassifierOutput, ValueOutput, value_output
from alignment.models.quantization import quantization_of
from alignment.ragged import Ragged, group_by_length

CALIBRATION = "reward_calibration.json"


class AdapterEnsemble(nn.Module):
    """Scalar models with an adapter and a head each over one frozen base; a token's number is their mean.

    An ensemble of heads needs no class of its own: the rows of one head on one trunk (see `ScalarModel`).
    """

    task = "scalar"

    def __init__(self, members: Sequence[ScalarModel | ExternalScalarModel]):
        super().__init__()
        self.members = nn.ModuleList(members)
        self.config = members[0].config
        self.spec = members[0].spec

    def virtual_tokens(self) -> int:
        """Positions that a prefix or soft prompt takes in front of every document."""
        return cast(Any, self.members[0]).virtual_tokens()

    def checkpoint_activations(self, enabled: bool = True, keep: Keep = "nothing") -> None:
        """Recompute blocks in the backward pass; see `NativeModel.checkpoint_activations`."""
        for member in self.members:
            cast(Any, member).checkpoint_activations(enabled, keep)

    def forward(self, *, batch: Ragged, tokens: Tensor | None = None) -> ValueOutput:
        """Values of every token, [N], or of `tokens`, [M], and the values by each member, [N, k] or [M, k]."""
        return value_output(torch.stack([member(batch=batch, tokens=tokens).values for member in self.members], -1))


Network = ScalarModel | ExternalScalarModel | DocumentClassifier | AdapterEnsemble
Combine = Literal["mean", "min", "lower"]
Text = str | tuple[str | Messages, str]


@dataclass(frozen=True)
class Calibration:
    """gain * score + bias has mean 0 and deviation 1 on the samples that it was fitted on.

    config.json and the weights stay as they were trained, so transformers' logits are the raw scores.
    """

    gain: float = 1.0  # 1 / deviation of the raw scores
    bias: float = 0.0  # -mean / deviation of the raw scores
    samples: int = 0  # 0: not fitted
    of: str = ""  # what the samples were, in words
    theta: float | None = None  # of Rao and Kupper's ties, for differences of raw scores; None: another loss

    @property
    def fitted(self) -> bool:
        """True where scores are changed at all."""
        return self.samples > 0

    def apply(self, scores: Tensor) -> Tensor:
        """gain * scores + bias; the scores themselves where nothing was fitted."""
        return self.gain * scores + self.bias if self.fitted else scores

    def write(self, directory: Path) -> None:
        """Write the file beside the weights in `directory`; none where there is nothing to say."""
        if self != Calibration():
            write_json(directory / CALIBRATION, asdict(self))


def fit_calibration(scores: Tensor, of: str) -> Calibration:
    """The gain and bias that give raw scores [n] of samples, `of` in words, mean 0 and (population) deviation 1.

    Raises:
        UserError: all scores are equal, or one is not finite.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2 (samples of the starting policy).
    """
    scores = scores.double()
    mean = scores.mean().item()
    deviation = scores.std(correction=0).item()
    if not deviation > 0:  # NaN too
        raise UserError(
            f"normalize: the deviation of the {len(scores)} scores of {of} is {deviation:g}, so no scale follows from "
            "them; take more or other samples, or leave normalize out"
        )
    return Calibration(1 / deviation, -mean / deviation, len(scores), of)


def read_calibration(directory: Path) -> Calibration:
    """The calibration of a saved reward model; one that changes nothing where there is no file."""
    path = directory / CALIBRATION
    if not path.is_file():
        return Calibration()
    content = read_json_object(path)
    try:
        scale = float(content["gain"]), float(content["bias"]), int(content["samples"]), str(content.get("of", ""))
        return Calibration(*scale, theta=None if content.get("theta") is None else float(content["theta"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: gain, bias, samples and theta must be numbers ({error!r}); train again, or delete the file for "
            "raw scores"
        ) from error


class Encoded(NamedTuple):
    """Token ids of a text, and the sentence of each, 0 or 1."""

    ids: Sequence[int]
    segments: Sequence[int]


@dataclass(frozen=True)
class RewardModel:
    """A scalar model, an encoder with a score head, or an ensemble of either, and its tokenizer.

    The scores of an ensemble become one by `combine`: their mean, their least ("min"), or mean - std_coef * deviation
    ("lower").

    Source: least and lower scores of an ensemble: Coste et al. 2023, arXiv:2310.02743, section 3.
    """

    model: Network
    tokenizer: Tokenizer
    calibration: Calibration = Calibration()  # from a run with `normalize`; raw scores are those before it
    combine: Combine = "mean"
    std_coef: float = 1.0
    loss: str | None = None  # of its training, where its files name it

    @property
    def is_encoder(self) -> bool:
        """True where it reads texts with the special tokens of an encoder."""
        return isinstance(self.model, DocumentClassifier)

    def shares_token_ids(self, tokenizer: Tokenizer) -> bool:
        """True where a policy's token ids can be scored as they are.

        Both need the same vocabulary and the same chat template (a reward model without a template uses the policy's).
        An encoder never shares ids, because it puts its own special tokens around prompt and response.
        """
        own_tokenizer = self.tokenizer
        same_template = not own_tokenizer.chat_template or own_tokenizer.chat_template == tokenizer.chat_template
        return same_vocabulary(own_tokenizer, tokenizer) and same_template and not self.is_encoder

    def score(
        self, texts: Sequence[Text], micro_batch_tokens: int | None = None, ended: Sequence[bool] | None = None
    ) -> Tensor:
        """Score whole texts, or prompts with their responses; a score does not depend on the batch around it.

        Args:
            texts: a plain text is tokenized as it is and the end token added; a (prompt, response) pair is tokenized as
                in training, its prompt a text or a list of messages. An encoder's tokenizer adds its special tokens
                around one text or two, one where the prompt is empty.
            micro_batch_tokens: tokens per forward; None: as many as `score_encoded` takes.
            ended: False where a pair's response was cut off, so that no end token follows it; None: all of them ended.
                The special tokens of an encoder do not depend on it.

        Returns:
            Scores, float32 on the CPU, [n]; normalized where the model was saved with `normalize`.

        Raises:
            UserError: a prompt is a list of messages and the reward model is an encoder, which reads no dialogues.
        """
        return self.combined(self.score_members(texts, micro_batch_tokens, ended))

    def score_members(
        self, texts: Sequence[Text], micro_batch_tokens: int | None = None, ended: Sequence[bool] | None = None
    ) -> Tensor:
        """Scores by each member of an ensemble, [n, k], k = 1 for a single model; arguments as for `score`."""
        return self.calibration.apply(score_encoded(self.model, self.encode(texts, ended), micro_batch_tokens))

    def combined(self, members: Tensor) -> Tensor:
        """One score from the scores by the members, as `combine` says; [n, k] -> [n]."""
        if self.combine == "min":
            return members.amin(-1)
        mean = members.mean(-1) if members.shape[-1] > 1 else members.squeeze(-1)
        return mean if self.combine == "mean" else mean - self.std_coef * members.std(-1, correction=0)

    def score_ids(self, documents: Sequence[Sequence[int]], micro_batch_tokens: int | None = None) -> Tensor:
        """Score token ids as they are, [n]."""
        return self.combined(self.calibration.apply(self.members_of_ids(documents, micro_batch_tokens)))

    def score_steps(
        self, prompt: str | Messages, steps: Sequence[str], separator: str = "\n", *, document: str | None = None
    ) -> Tensor:
        """Probability that each step of a response is right, [S], from a process reward model.

        Args:
            prompt: text or messages.
            steps: texts of the steps.
            separator: text after each step, as in training; a step's score is read at its last token.
            document: None: the probabilities of the steps; "min" or "product": of the whole response, a scalar.

        Raises:
            UserError: the model is an encoder, or was trained with another loss; there are no steps, or more text than
                fits into the model's positions, which would leave steps without a score.

        Source: Lightman et al. 2023, arXiv:2305.20050, section 2.6 (product), appendix F (minimum).
        """
        if self.is_encoder or self.loss not in (None, "steps"):
            raise UserError(
                f"scores of steps need a decoder trained with loss=steps; this model is "
                f"{'an encoder' if self.is_encoder else f'trained with loss={self.loss}'}"
            )
        if document not in (None, "min", "product"):
            raise ValueError(f"document must be None, 'min' or 'product', got {document!r}")
        from alignment.data.tokenize import tokenize_steps

        room = self.model.spec.max_positions - self.model.virtual_tokens()
        row = Steps(prompt, tuple(steps), (True,) * len(steps), "steps", separator)
        examples, counts = tokenize_steps([row], self.tokenizer, room)
        if counts.lost or counts.cut:
            raise UserError(
                f"prompt and {len(steps)} step(s) have no score: there must be a step, and all of them must fit into "
                f"the {room} tokens that the model reads at once"
            )
        [example] = examples
        batch = Ragged.build([example.ids])
        with torch.no_grad():
            values = self.model(batch=batch.to(next(self.model.parameters()).device)).values
        right = values[torch.tensor(example.values["ends"], device=values.device)].float().cpu().sigmoid()
        return right if document is None else right.min() if document == "min" else right.prod()

    def encode(self, texts: Sequence[Text], ended: Sequence[bool] | None = None) -> list[Encoded]:
        """Token ids and segments of texts and pairs of texts; arguments as for `score`."""
        if self.is_encoder:
            parts = [("", text) if isinstance(text, str) else text for text in texts]
            plain = [(prompt, response) for prompt, response in parts if isinstance(prompt, str)]
            if len(plain) < len(parts):
                raise UserError("this reward model is an encoder and reads texts; give each prompt as one text")
            return [Encoded(one.ids, one.segments) for one in encode_prompts_with_responses(self.tokenizer, plain)]
        whole = [True] * len(texts) if ended is None else ended
        ids = [self._ids(text, end) for text, end in zip(texts, whole, strict=True)]
        return [Encoded(one, [0] * len(one)) for one in ids]

    def _ids(self, text: Text, ended: bool) -> list[int]:
        if isinstance(text, str):
            return texts_ids(self.tokenizer, [text])[0]
        prompt, response = text
        encoded = encode_response(self.tokenizer, response, prompt, ended=ended)
        return [*(encoded.prompt or prompt_ids(self.tokenizer, prompt)), *encoded.ids]

    def members_of_ids(self, documents: Sequence[Sequence[int]], micro_batch_tokens: int | None = None) -> Tensor:
        """Raw scores of token ids by each member, before any calibration, [n, k]."""
        return score_encoded(self.model, [Encoded(ids, [0] * len(ids)) for ids in documents], micro_batch_tokens)


@torch.no_grad()
def score_encoded(model: nn.Module, texts: Sequence[Encoded], micro_batch_tokens: int | None = None) -> Tensor:
    """Raw scores of texts by each member of a model, whole or sharded by an engine, float32 on the CPU, [n, k].

    Args:
        micro_batch_tokens: None: 16,384 on a GPU, 4,096 on a CPU, which more of them slow down.
    """
    group_scores: list[tuple[list[int], Tensor]] = []
    device = next(model.parameters()).device
    limit = micro_batch_tokens or (4_096 if device.type == "cpu" else 16_384)
    for group in group_by_length([len(text.ids) for text in texts], limit):
        batch = Ragged.build([texts[i].ids for i in group], segments=[texts[i].segments for i in group])
        group_scores.append((group, batch_scores(model, batch.to(device)).float().cpu()))
    scores = torch.zeros(len(texts), group_scores[0][1].shape[1] if group_scores else 1)
    for group, values in group_scores:
        scores[group] = values
    return scores


def batch_scores(model: nn.Module, batch: Ragged) -> Tensor:
    """Raw scores of a batch's documents by each member of a model, or a classifier's logits, with gradient, [B, k]."""
    is_decoder = getattr(model, "task", "") == "scalar"
    last_alone = {"tokens": batch.last} if is_decoder else {}  # its last layer computes no other tokens then
    return document_scores(model(batch=batch, **last_alone), None if is_decoder else batch.last)


def document_scores(output: ValueOutput | ClassifierOutput, read_at: Tensor | None = None) -> Tensor:
    """Scores in a model's output by each member, [B, k]; of a decoder at tokens `read_at` [B], None: at all it has."""
    if isinstance(output, ClassifierOutput):
        return output.logits
    members = output.values[:, None] if output.members is None else output.members
    return members if read_at is None else members[read_at]


# Canaries: eight short texts whose scores are saved with a reward model and computed again when it is loaded. Lost
# heads, swapped base models and changed tokenizers all give plausible scores; these give others than they gave.

CANARIES = "canaries.json"
TEXTS = (
    ("What is the tallest tree?", " The coast redwood, which can grow above 115 meters."),
    ("What is the tallest tree?", " I do not know."),
    ("Write a sentence about the sea.", " The sea was calm, and the boats lay still."),
    ("Write a sentence about the sea.", " sea sea sea sea"),
    ("How many days does a week have?", " Seven."),
    ("How many days does a week have?", " Five, or perhaps nine; nobody has counted them."),
    ("Say hello to a new colleague.", " Hello, and welcome! Shall I show you around?"),
    ("Say hello to a new colleague.", " Go away."),
)
# Largest difference, as a share of the largest score or of 1, by the lowest type of the weights, then or now. The 30
# layers of a real base of 135 M, trained in mixed precision and loaded wholly in bfloat16, gave 0.16 after two updates.
TOLERANCES = {"float32": 1e-3, "half": 0.25, "quantized": 0.5}


@dataclass(frozen=True)
class Canaries:
    """Scores and settings of a saved reward model, beside its weights."""

    scores: Tensor  # raw score of each of the texts by each member, [8, k]
    precision: str  # key of `TOLERANCES` of the run that trained it
    loss: str  # of its training
    texts: tuple[tuple[str, str], ...] = TEXTS  # (prompt, response) of each

    def write(self, directory: Path) -> None:
        rows = [
            {"prompt": prompt, "response": response, "scores": scores}
            for (prompt, response), scores in zip(self.texts, self.scores.tolist(), strict=True)
        ]
        write_json(directory / CANARIES, {"loss": self.loss, "precision": self.precision, "canaries": rows})


def score_canaries(reward_model: RewardModel, texts: tuple[tuple[str, str], ...] = TEXTS) -> Tensor:
    """Raw scores of the texts by each member, [8, k]."""
    return score_encoded(reward_model.model, canary_ids(reward_model, texts))


def canary_ids(reward_model: RewardModel, texts: tuple[tuple[str, str], ...] = TEXTS) -> list[Encoded]:
    """The texts as the model reads them, cut to its positions."""
    room = reward_model.model.spec.max_positions - reward_model.model.virtual_tokens()
    return [Encoded(one.ids[:room], one.segments[:room]) for one in reward_model.encode(texts)]


def read_canaries(directory: Path) -> Canaries | None:
    """The canaries of a saved reward model; None where there is no file."""
    path = directory / CANARIES
    if not path.is_file():
        return None
    content = read_json_object(path)
    try:
        rows: list[Any] = content["canaries"]
        texts = tuple((str(row["prompt"]), str(row["response"])) for row in rows)
        scores = torch.tensor([[float(score) for score in row["scores"]] for row in rows])
        if content["precision"] not in TOLERANCES or scores.dim() != 2:
            raise ValueError(content["precision"])
        return Canaries(scores, content["precision"], str(content["loss"]), texts)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: not the scores of {len(TEXTS)} texts ({error!r}); copy the file from the run again, or delete it "
            "to load the model unchecked"
        ) from error


def check_canaries(reward_model: RewardModel, directory: Path, source: str, rounded: bool = False) -> float | None:
    """Score the canaries of a reward model again, where its directory has them; the largest difference.

    Args:
        rounded: the weights were quantized after the model was saved, and are held as floats now.

    Raises:
        UserError: a score differs from that of the saved model, beyond the rounding of types and quantization.
    """
    saved = read_canaries(directory)
    if saved is None:
        return None
    scores = score_canaries(reward_model, saved.texts)
    if scores.shape != saved.scores.shape:
        raise UserError(
            f"{source}: {CANARIES} was written for {saved.scores.shape[1]} score(s) per text, and the model gives "
            f"{scores.shape[1]}; its head is not the one that was trained"
        )
    now = "quantized" if rounded else weights_precision(reward_model.model)
    precision = max(saved.precision, now, key=lambda name: TOLERANCES[name])
    allowed = TOLERANCES[precision] * max(1.0, saved.scores.abs().max().item())
    differences = (scores - saved.scores).abs().amax(1).nan_to_num(nan=torch.inf)
    worst = int(differences.argmax())
    if differences[worst] > allowed:
        raise UserError(
            f"{source}: the reward model scores {saved.texts[worst][1]!r} with {_shown(scores[worst])}, and scored it "
            f"with {_shown(saved.scores[worst])} when it was saved (allowed difference {allowed:.3g}): its head, "
            "weights, base model or tokenizer are not those that were trained; copy the run's directory again. If the "
            f"change is wanted, delete {directory / CANARIES}"
        )
    return differences[worst].item()


def weights_precision(model: torch.nn.Module) -> str:
    """The key of `TOLERANCES` for a model's weights."""
    if quantization_of(model) is not None:
        return "quantized"
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return "half" if types & {torch.bfloat16, torch.float16} else "float32"


def _shown(scores: Tensor) -> str:
    return ", ".join(f"{score:.4g}" for score in scores.tolist())
