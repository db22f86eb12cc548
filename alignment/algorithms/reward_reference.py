"""What is measured once a reward model is trained and saved with it: its scale on reference samples, and its canaries."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from alignment.algorithms.policies import Policy
from alignment.data.config import DataConfig
from alignment.data.examples import Example
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.loading import architecture_of
from alignment.models.classifiers import SequenceClassifier
from alignment.reward_model.calibration import Calibration, fit_calibration
from alignment.reward_model.canaries import Canaries, canary_ids, weights_precision
from alignment.reward_model.model import Encoded, RewardModel, score_encoded
from alignment.training import Engine, TrainingConfig


@dataclass(frozen=True)
class NormalizeConfig:
    """Reference samples whose scores are to have mean 0 and deviation 1. The gain and bias are kept beside the weights.

    Attributes:
        responses: given: those of the held-out rows, or of the training rows where none are held out. sampled: the starting
            policy answers `prompts`, as Ziegler et al. do; for decoders with a language head.
        prompts: file of prompts for `sampled`.
        samples: at most so many.
        max_new_tokens: longest sampled response.
        temperature: of sampled responses.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """

    responses: Literal["given", "sampled"] = "given"
    prompts: str | None = None
    samples: int = 256
    max_new_tokens: int = 64
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if (self.responses == "sampled") != (self.prompts is not None):
            raise ValueError("normalize.responses=sampled and normalize.prompts (a file of prompts) go together")
        if self.samples < 2 or self.max_new_tokens < 1 or self.temperature <= 0:
            raise ValueError(
                f"normalize.samples must be at least 2, max_new_tokens at least 1 and temperature above 0, got "
                f"{self.samples}, {self.max_new_tokens} and {self.temperature}"
            )

    def missing(self) -> Iterator[tuple[str, str]]:
        """The key `prompts`, and why, where that file is not there."""
        return (("prompts", why) for _, why in DataConfig(self.prompts).missing()) if self.prompts else iter(())


def reference_rows(
    config: NormalizeConfig, policy: str, rows: Sequence[Example], tokenizer: Tokenizer, *, max_length: int
) -> Sequence[Example]:
    """What the reference samples will be made of, prompts or rows; no network is loaded.

    Args:
        config: which samples.
        policy: the run's starting checkpoint, which answers prompts.
        rows: examples of the run, for given responses.
        tokenizer: of the policy and the reward model.
        max_length: of prompts, in tokens.

    Raises:
        UserError: bad prompts, a policy that cannot answer them, or fewer than two samples.
    """
    if config.responses == "sampled":
        found, count = _prompts(config, policy, tokenizer, max_length), 1
    else:
        # Not every row of a long data set is read, and those that are lie evenly over it: it may be sorted.
        count = len(encoded_documents(rows[0]))
        wanted = min(len(rows), -(-config.samples // count))
        found = [rows[number * len(rows) // wanted] for number in range(wanted)]
    if len(found) * count < 2:
        raise UserError(f"normalize: {len(found) * count} reference sample(s); a deviation needs two")
    return found


def reference_texts(
    config: NormalizeConfig, policy: str, rows: Sequence[Example], tokenizer: Tokenizer
) -> tuple[list[Encoded], str]:
    """The reference samples as the reward model reads them, and what they are in words; `rows`: from `reference_rows`."""
    if config.responses == "sampled":
        return _sampled(config, policy, rows, tokenizer), f"{policy}'s own responses to {config.prompts}"
    texts = [text for row in rows for text in encoded_documents(row)]
    return texts[: config.samples], "responses of the rows"


def encoded_documents(row: Example) -> list[Encoded]:
    """The documents of an example; an encoder's segments are the masks of its texts."""
    masks = zip(row.documents, row.masks, strict=True)
    return [Encoded(ids, [int(second) for second in mask]) for ids, mask in masks]


def _prompts(config: NormalizeConfig, policy: str, tokenizer: Tokenizer, max_length: int) -> Sequence[Example]:
    """The prompts that the policy is to answer."""
    from alignment.data.prepare import prepare

    if (architecture := architecture_of(policy)) != "decoder":
        raise UserError(
            f"normalize.responses=sampled: {policy} is an {architecture}, which answers no prompts; take "
            "normalize.responses=given"
        )
    data = DataConfig(train=config.prompts or "", max_length=max_length, max_rows=config.samples)
    return prepare(data, "prompts", tokenizer)[0]


def _sampled(config: NormalizeConfig, policy: str, prompts: Sequence[Example], tokenizer: Tokenizer) -> list[Encoded]:
    """Prompts with the policy's responses to them."""
    from alignment.data.text.chat import stop_token_ids
    from alignment.generation import SamplingConfig, decode_responses
    from alignment.loading import load_model

    ids = [list(document) for prompt in prompts for document in prompt.documents]
    sampling = SamplingConfig(config.max_new_tokens, config.temperature)
    responses = decode_responses(load_model(policy), ids, sampling, stop_ids=sorted(stop_token_ids(tokenizer)))
    whole = [[*prompt, *response] for prompt, response in zip(ids, responses.token_ids, strict=True)]
    return [Encoded(one, [0] * len(one)) for one in whole]


def measure_reference(
    engine: Engine,
    policy: Policy,
    training: TrainingConfig,
    *,
    loss: str,
    references: tuple[list[Encoded], str] | None,
    theta: Tensor | float | None = None,
) -> tuple[Canaries, Calibration]:
    """The canaries of the trained model in memory, and its calibration; a collective operation.

    Args:
        engine: that trained the model.
        policy: as it was loaded.
        training: the run's settings.
        loss: the run's.
        references: from `reference_texts`; None: scores stay as they are.
        theta: the parameter of ties; None: the loss has none.
    """
    model = engine.backend.unwrapped
    was_training = model.training
    engine.model.eval()
    scores = scores_of(engine, canary_ids(RewardModel(policy.model, policy.tokenizer)), training)
    calibration = Calibration()
    if references is not None:
        texts, of = references
        calibration = fit_calibration(scores_of(engine, texts, training).mean(-1), of)
    engine.model.train(was_training)
    precision = weights_precision(model)
    precision = "half" if precision == "float32" and training.precision == "bf16" else precision
    number = theta.item() if isinstance(theta, Tensor) else theta
    return Canaries(scores, precision, loss), replace(calibration, theta=number)


def scores_of(engine: Engine, texts: Sequence[Encoded], training: TrainingConfig) -> Tensor:
    """Raw scores by the model in training, [n, k]; every rank computes all of them."""
    with torch.no_grad(), engine.backend.autocast():
        if isinstance(engine.backend.unwrapped, SequenceClassifier):
            return score_encoded(engine.model, texts, training.tokens_per_forward)
        plain = [Encoded(text.ids, [0] * len(text.ids)) for text in texts]
        return score_encoded(engine.model, plain, training.tokens_per_forward)


def write_reference(canaries: Canaries, calibration: Calibration, directory: Path) -> None:
    """Write both beside the weights."""
    canaries.write(directory)
    calibration.write(directory)
