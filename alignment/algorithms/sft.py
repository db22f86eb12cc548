"""Supervised fine-tuning (SFT): next-token loss on the response, or on prompt and response.

Pretraining and the text beside PPO have the same loss function.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval

from alignment.adapters.specs import AdapterSpec, refuse_new_tokens
from alignment.algorithms.policies import GENERATORS, Policy, Role, load_policy, note_balance, note_memory, save_policy
from alignment.algorithms.runs import (
    check_rows,
    collate_for,
    open_run,
    prepare_training,
    read_split,
    sources_of,
)
from alignment.data.batches import Example, collate, collate_whole
from alignment.data.config import DataConfig
from alignment.data.text.chat import stop_token_ids
from alignment.data.tokenize import last_span
from alignment.data.tokenizers.tokenizer import known_tokens
from alignment.errors import UserError
from alignment.loading import Checkpoint, load_tokenizer, preparation_for
from alignment.losses.language import TokenLoss
from alignment.models.embedding_noise import add_embedding_noise
from alignment.models.model import check_lengths, evaluation_mode, start_token_of
from alignment.models.outputs import LogProbModel
from alignment.models.shared_weights import SharedWeights
from alignment.models.weights_config import WeightsConfig, check_weights
from alignment.ragged import Ragged, Seq2Seq
from alignment.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Rule, Settings, refusal
from alignment.training import Engine, LossFn, LossSum, OptimConfig, Run, TrainingConfig, fit
from alignment.training.terms import ONE_SOURCE, Sources


@dataclass(frozen=True)
class SamplesConfig(Settings):
    """The choice of responses that are written during a run.

    Attributes:
        prompts: number of prompts: the first held-out ones, or of the training rows where none are held out.
        max_new_tokens: longest response, end token included.
        temperature: 0 takes the likeliest token each time. The random numbers are the same at every evaluation.
    """

    prompts: PositiveInt = 4
    max_new_tokens: PositiveInt = 64
    temperature: NonNegativeFloat = 1.0


@dataclass(frozen=True)
class SFTOptim(OptimConfig):
    """The optimizer and its schedule, with the learning rate of SFT."""

    learning_rate: PositiveFloat = 1e-5


@dataclass(frozen=True)
class SFTConfig(Settings):
    """Settings of one supervised fine-tuning run.

    Attributes:
        policy: directory or hub name of the checkpoint to start from, a decoder or an encoder-decoder (T5, BART), whose
            encoder reads the prompt and whose decoder learns the response.
        data: demonstrations.
        output: the run's directory.
        adapter: train a LoRA or prefix adapter on the frozen model; None trains every weight.
        chat_template: a built-in one's name (chatml, llama3, ...) or a Jinja file, also saved with the model; None: the
            tokenizer's own.
        add_tokens: new tokens for the vocabulary, each of them one token wherever a row's text has it; their rows start
            as the mean of the others. Later stages (dpo, ppo, reward) start from the model that is saved, which has
            them. Not with `adapter`.
        add_special_tokens: new control tokens, which `chat_template` writes; a row's text cannot.
        weights: type of the frozen weights in memory.
        loss_on: completion: the response and its end token are predicted, in dialogues every turn that is trained.
            all: the prompt too, every token but the first, which nothing comes before.
        label_smoothing: share of each target that is spread evenly over the vocabulary, in [0, 1).
        z_loss: weight of log(Z)^2 per token, which holds the sum of the exponentiated logits near 1; PaLM has 1e-4.
        neftune_alpha: size of NEFTune's noise on the token vectors in training, such as 5 (Jain et al. 2023,
            arXiv:2310.05914); None: no noise.
        samples: responses written to samples.jsonl at every evaluation; None: none.
    """

    policy: str
    data: DataConfig
    output: str
    adapter: AdapterSpec | None = None
    chat_template: str | None = None
    add_tokens: tuple[str, ...] = ()
    add_special_tokens: tuple[str, ...] = ()
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    loss_on: Literal["completion", "all"] = "completion"
    label_smoothing: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    z_loss: NonNegativeFloat = 0.0
    neftune_alpha: PositiveFloat | None = None
    samples: SamplesConfig | None = None
    optim: SFTOptim = field(default_factory=SFTOptim)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    RULES = (
        Rule("weights", lambda c: refusal(check_weights, c.weights, frozen=c.adapter is not None)),
        Rule("add_tokens", lambda c: refusal(refuse_new_tokens, c.adapter, c.new_tokens)),
    )

    @property
    def new_tokens(self) -> tuple[str, ...]:
        """All tokens that are added to the vocabulary."""
        return (*self.add_tokens, *self.add_special_tokens)

    @property
    def token_loss(self) -> TokenLoss | None:
        """The loss of a token, where it is not -log p(token)."""
        return TokenLoss(self.label_smoothing, self.z_loss) if self.label_smoothing or self.z_loss else None


def run(config: SFTConfig) -> Path:
    """Fine-tune and return the directory of the result, `output/model`.

    Each update minimizes the mean of -log p(token) over all response tokens of the global batch, end token included.
    That is the metric `loss`; with label smoothing or z-loss, `loss` is what is minimized and `nll` that mean.

    Raises:
        UserError: bad data or checkpoint, before any training.

    Source: Ouyang et al. 2022, arXiv:2203.02155, section 3.5.
    """
    with open_run(config, "sft", parents=[config.policy]) as run:
        if run.finished:
            return run.output / "model"
        start = Checkpoint(config.policy)
        new = {"add_tokens": config.add_tokens, "add_special_tokens": config.add_special_tokens}
        tokenizer = load_tokenizer(start, config.chat_template, **new)
        if config.loss_on == "all" and start.architecture == "encoder-decoder":
            raise UserError(
                f"loss_on: {config.policy} is an encoder-decoder, whose encoder reads the prompt and predicts none of "
                "it; leave loss_on=completion"
            )
        preparation = preparation_for(start, "demonstrations")
        train, held_out = read_split(config, "demonstrations", tokenizer, run, preparation=preparation)
        policy = load_policy(
            start,
            config.adapter,
            tokenizer,
            config.output,
            bases=SharedWeights(config.weights),
            new_tokens=config.new_tokens,
            architectures=GENERATORS,
        )
        check_rows(policy.model, train + held_out, config.data.max_length)
        if config.neftune_alpha is not None:
            add_embedding_noise(policy.model, config.neftune_alpha)
        engine, stream = prepare_training(policy.model.train(), config, train, run)
        save = partial(save_policy, engine, policy, run.output, max_shard_size=config.training.max_shard_size)
        note_memory(run, [Role("policy", engine.backend.unwrapped, engine)])
        note_balance(run, policy.model, added=True)
        fit(
            engine,
            stream,
            collate_for(policy.model, collate_whole if config.loss_on == "all" else collate),
            language_loss_fn(engine.model, sources_of(config.data), config.token_loss),
            training=config.training,
            run=run,
            held_out=held_out,
            save=save,
            observe=config.samples and response_writer(config.samples, policy, engine, held_out or train, run),
        )
        return run.output / "model"


def language_loss_fn(model: LogProbModel, sources: Sources = ONE_SOURCE, token_loss: TokenLoss | None = None) -> LossFn:
    """Return the loss function of a language model: -log p(token), summed over the batch's targets.

    The metric `perplexity` is the exponential of its mean. Mixtures of experts add their load-balancing loss, times the
    weight of the targets.

    Args:
        model: called on a batch.
        sources: reported separately in metrics.
        token_loss: label smoothing and z-loss; -log p(token) itself is then the metric `nll`.
    """

    def loss_fn(batch: Ragged | Seq2Seq) -> LossSum:
        output = model(batch=batch) if token_loss is None else model(batch=batch, token_loss=token_loss)
        nll = -output.log_probs if token_loss is None else -output.log_probs.detach()
        losses, sums = (nll, {}) if output.losses is None else (output.losses, {"nll": nll.sum()})
        loss = sources.loss_sum(losses, batch, sums, perplexity=nll)
        means = loss.means | {"perplexity": (nll.detach().sum(), nll.new_full((), len(nll)))}
        if output.balance is None:
            return replace(loss, means=means)
        balance = output.balance * batch.weight
        return LossSum(loss.total + balance, {**loss.metrics, "balance_loss": balance}, means)

    return loss_fn


# Responses to a few fixed prompts, written to the run's samples.jsonl at every evaluation


def response_writer(
    config: SamplesConfig, policy: Policy, engine: Engine, examples: Sequence[Example], run: Run
) -> Callable[[int], None]:
    """Return a function that writes responses of the model in training after an update, given its number; collective.

    A prompt is all that comes before the last response of an example.

    Raises:
        UserError: a prompt and its response do not fit the model's positions.
    """
    model = engine.backend.unwrapped
    tokenizer = policy.tokenizer
    chosen = [examples[index] for index in range(min(config.prompts, len(examples)))]
    prompts = [prompt_of(example) for example in chosen]
    start = start_token_of(policy.model)
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts]
    lengths = [(row.row_id, len(ids) if start is None else 1) for row, ids in zip(chosen, prompts, strict=True)]
    check_lengths(model, lengths, "lower samples.max_new_tokens", config.max_new_tokens)

    def write(step: int) -> None:
        from alignment.generation import SamplingConfig, decode_responses, response_text  # only a run with samples

        sampling = SamplingConfig(config.max_new_tokens, config.temperature)
        # Whole on every rank, so that rank 0 can sample by itself.
        with evaluation_mode(model), engine.backend.full_parameters():
            if run.is_main:
                stops = sorted(stop_token_ids(tokenizer))
                known = known_tokens(tokenizer)
                responses = decode_responses(
                    policy.model, prompts, sampling, stops, start_token=start, vocabulary=known
                )
                rows = [
                    {"prompt": prompt, "response": response_text(tokenizer, tokens, ended, start)}
                    for prompt, tokens, ended in zip(texts, responses.token_ids, responses.ended, strict=True)
                ]
                run.log_samples(step, rows)

    return write


def prompt_of(example: Example) -> list[int]:
    """Token ids of all that comes before an example's last response."""
    end = max((index + 1 for index, counts in enumerate(example.mask) if counts), default=len(example.mask))
    return list(example.ids[: max(1, last_span(example.mask[:end]))])
