"""Responses to a few fixed prompts, written to the run's samples.jsonl at every evaluation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alignment.algorithms.policies import Policy
from alignment.data.batches import Example
from alignment.data.text.chat import stop_token_ids
from alignment.models.model import check_lengths
from alignment.settings import NonNegativeFloat, PositiveInt, Settings
from alignment.training import Engine, Run


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


def response_writer(
    config: SamplesConfig, policy: Policy, engine: Engine, examples: Sequence[Example], run: Run
) -> Callable[[int], None]:
    """Return a function that writes responses of the model in training after an update, given its number; collective.

    A prompt is all that comes before the last response of an example.

    Raises:
        UserError: a prompt and its response do not fit the model's positions.
    """
    model, tokenizer = engine.backend.unwrapped, policy.tokenizer
    chosen = [examples[number] for number in range(min(config.prompts, len(examples)))]
    prompts = [prompt_of(example) for example in chosen]
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts]
    lengths = [(example.row_id, len(ids)) for example, ids in zip(chosen, prompts, strict=True)]
    check_lengths(model, lengths, "lower samples.max_new_tokens", config.max_new_tokens)

    def write(step: int) -> None:
        from alignment.generation import SamplingConfig, decode_responses, response_text  # only a run with samples

        sampling, was_training = SamplingConfig(config.max_new_tokens, config.temperature), model.training
        model.eval()
        with engine.backend.full_parameters():  # whole on every rank, so that rank 0 can sample by itself
            if run.is_main:
                found = decode_responses(policy.model, prompts, sampling, sorted(stop_token_ids(tokenizer)))
                for prompt, tokens, ended in zip(texts, found.token_ids, found.ended, strict=True):
                    run.sample(step, prompt=prompt, response=response_text(tokenizer, tokens, ended))
        model.train(was_training)

    return write


def prompt_of(example: Example) -> list[int]:
    """Token ids of all that comes before an example's last response."""
    mask = list(example.mask)
    end = next((index + 1 for index in reversed(range(len(mask))) if mask[index]), len(mask))
    start = next((index + 1 for index in reversed(range(end)) if not mask[index]), 0)
    return list(example.ids[: max(start, 1)])
