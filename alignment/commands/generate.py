"""The command `alignment generate`: prompts in, rows of responses out."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from alignment.adapters import load_adapter
from alignment.config.load import build
from alignment.config.yaml_source import SourcedYaml, override
from alignment.data.rows.read import read_rows
from alignment.errors import UserError, raise_all
from alignment.generation import SamplingConfig, decoding_config
from alignment.generation import generate as generate_texts
from alignment.loading import best_device, describe_stop_tokens, find_directory, load_model, load_tokenizer
from alignment.models.huggingface.generation_config import GENERATION_CONFIG, read_generation_config
from alignment.models.weights_config import DEFAULT_WEIGHTS, WeightsConfig
from alignment.settings import PositiveInt, Rule, refusal


@dataclass(frozen=True)
class GenerateConfig(SamplingConfig):
    """Settings of `alignment generate`: those of `SamplingConfig`, of `BeamConfig`, and its own.

    Attributes:
        batch_size: rows of the cache that are decoded together: one per prompt, or per beam.
        num_beams, length_penalty, early_stopping: of beam search, see `BeamConfig`; 1 beam samples.
        chat_template: a built-in one's name (chatml, llama3, ...) or a Jinja file; None: the tokenizer's own.
        use_generation_config: settings that are not given come from the checkpoint's generation_config.json.
    """

    batch_size: PositiveInt = 64
    use_generation_config: bool = False
    num_beams: PositiveInt = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    chat_template: str | None = None

    RULES = (
        Rule(
            "num_beams",
            lambda c: refusal(decoding_config, c.sampling, c.num_beams, c.length_penalty, c.early_stopping),
        ),
    )

    @property
    def sampling(self) -> SamplingConfig:
        """The settings of one response."""
        return SamplingConfig(**{each.name: getattr(self, each.name) for each in fields(SamplingConfig)})


def read_settings(model: str, overrides: Sequence[str]) -> GenerateConfig:
    """Settings from `key=value`; the others are defaults, or the checkpoint's with `use_generation_config`.

    Raises:
        UserError: every wrong key or value at once; `use_generation_config` without such a file.
    """
    document = override(SourcedYaml({}), overrides)
    config = build(GenerateConfig, document)
    if not config.use_generation_config:
        return config
    path = find_directory(model) / GENERATION_CONFIG
    stored = read_generation_config(path.parent)
    if stored is None:
        raise UserError(f"{path}: is not there; leave use_generation_config out")
    known = stored_settings(stored)
    return build(GenerateConfig, SourcedYaml({**known, **document.values}, {(): str(path), **document.locations}))


def stored_settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a generation_config.json; keys without an equivalent here are left out."""
    known = {each.name: stored[each.name] for each in fields(SamplingConfig) if stored.get(each.name) is not None}
    if not stored.get("do_sample", False):
        known["temperature"] = 0.0  # transformers' default is greedy decoding
    if (stored.get("num_beams") or 1) > 1:  # the settings of beam search count only with it
        known["num_beams"] = stored["num_beams"]
        known |= {key: stored[key] for key in ("length_penalty", "early_stopping") if stored.get(key) is not None}
    return known


def generate_responses(
    model: str,
    adapter: str | None,
    prompts: Sequence[str] | str,
    config: GenerateConfig,
    *,
    raw: bool = False,
    weights: WeightsConfig = DEFAULT_WEIGHTS,
) -> list[dict[str, Any]]:
    """One row per prompt: prompt, response, token_ids, log_probs, ended.

    log_probs are in nats: of the distribution sampled from; of a beam search the model's own, after the logits
    processors. How the prompts are read and which tokens end a response is printed on standard error.

    Args:
        model: directory or Hub name.
        adapter: directory of an adapter for it.
        prompts: texts, or the name of a file of prompts.
        weights: type that the model is held and computes in (auto: the checkpoint's), and whether it is quantized.
        raw: do not apply the model's chat template; with the template a text is one user message.

    Raises:
        UserError: no such model, adapter or file; bad rows; lists of messages without a chat template.
    """
    if isinstance(prompts, str):
        rows, _ = read_rows(prompts, "prompts")
        raise_all(
            f"{getattr(row, 'row_id', '')}: tool definitions are not read here; put them into the system message"
            for row in rows
            if getattr(row, "tools", None)
        )
        written: list[Any] = [getattr(row, "prompt") for row in rows]  # noqa: B009  (a record of this kind has one)
    else:
        written = list(prompts)
    tokenizer = load_tokenizer(model, config.chat_template)
    stops = describe_stop_tokens(model, tokenizer)
    loaded = load_model(model, weights.dtype, best_device(), quantize=weights.quantize)
    if adapter is not None:
        loaded = load_adapter(loaded, find_directory(adapter)).eval()
    has_template = tokenizer.chat_template is not None and not loaded.config.get("is_encoder_decoder")
    inputs, explanation = _apply_template(written, raw=raw, has_template=has_template)
    print(f"{explanation}; {stops}", file=sys.stderr)
    settings = asdict(config)
    settings.pop("use_generation_config")
    settings.pop("chat_template")
    generated = generate_texts(loaded, tokenizer, inputs, **settings)
    columns = (written, generated.texts, generated.token_ids, generated.log_probs, generated.ended)
    names = ("prompt", "response", "token_ids", "log_probs", "ended")
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


Messages = list[dict[str, str]]


def _apply_template(
    prompts: Sequence[str | Messages], *, raw: bool, has_template: bool
) -> tuple[list[str | Messages], str]:
    """Prompts as the model reads them, and one sentence on how it does."""
    if raw:
        raise_all(
            f"prompt {number}: is a list of messages, which only a chat template can read; leave --raw out"
            for number, prompt in enumerate(prompts)
            if not isinstance(prompt, str)
        )
    if not has_template:
        return list(prompts), "prompts are read as they are: the model has no chat template"
    if raw:
        return list(prompts), "prompts are read as they are, without the model's chat template (--raw)"
    messages = [[{"role": "user", "content": each}] if isinstance(each, str) else each for each in prompts]
    return [*messages], "each prompt goes through the model's chat template (--raw reads it as it is)"
