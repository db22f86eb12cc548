"""The command `alignment generate`: prompts in, rows of responses out."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from alignment.adapters import check_adapters, load_adapter, load_adapters
from alignment.config.load import build
from alignment.config.yaml_source import SourcedYaml, override
from alignment.data.rows.read import read_rows
from alignment.errors import UserError, raise_all
from alignment.generation import SamplingConfig, decoding_config
from alignment.generation import generate as generate_texts
from alignment.loading import Checkpoint, best_device, describe_stop_tokens, find_directory, load_model, load_tokenizer
from alignment.models.language_model import LanguageModel
from alignment.models.weights_config import DEFAULT_WEIGHTS, WeightsConfig
from alignment.settings import PositiveInt, Rule, refusal


@dataclass(frozen=True)
class GenerateConfig(SamplingConfig):
    """Settings of `alignment generate`, beside `SamplingConfig` and `BeamConfig`.

    Attributes:
        batch_size: rows of the cache that are decoded together: one per prompt, or per beam.
        num_beams, length_penalty, early_stopping: of beam search, see `BeamConfig`; 1 beam samples.
        chat_template: a built-in one's name (chatml, llama3, ...) or a Jinja file; None: the tokenizer's own.
        prefix_mask: a prompt's tokens see one another in both directions, for a decoder that was trained as a prefix
            LM.
    """

    batch_size: PositiveInt = 64
    num_beams: PositiveInt = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    chat_template: str | None = None
    prefix_mask: bool = False

    RULES = (Rule("num_beams", lambda c: refusal(decoding_config, c, c.num_beams, c.length_penalty, c.early_stopping)),)


def generate_responses(
    model: str,
    adapter: str | None,
    prompts: Sequence[str] | str,
    overrides: Sequence[str],
    *,
    raw: bool = False,
    weights: WeightsConfig = DEFAULT_WEIGHTS,
    adapters: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """One row per prompt (texts, or the name of a file): prompt, response, token_ids, log_probs, ended.

    With `adapters` (name -> directory) the rows of the file name theirs in a column `adapter`, which is kept.

    log_probs are in nats: of the distribution sampled from; of a beam search the model's own, after the logits
    processors. `raw`: do not apply the model's chat template; with the template a text is one user message.
    """
    settings = asdict(build(GenerateConfig, override(SourcedYaml({}), overrides)))
    named = {name: find_directory(directory) for name, directory in (adapters or {}).items()}
    check_adapters(named)
    written, names = _read_file(prompts, named) if isinstance(prompts, str) else (list[Any](prompts), None)
    checkpoint = Checkpoint(model)
    tokenizer = load_tokenizer(checkpoint, settings.pop("chat_template"))
    loaded = load_model(checkpoint, weights.dtype, best_device(), quantize=weights.quantize)
    if settings.pop("prefix_mask"):
        if not isinstance(loaded, LanguageModel):
            raise UserError(
                f"prefix_mask needs a decoder of this library's own families, and {model} is none; leave it out"
            )
        loaded.prefix_mask = True
    if adapter is not None:
        loaded = load_adapter(loaded, find_directory(adapter)).eval()
    if named:
        loaded = load_adapters(loaded, named)
    inputs = written
    explanation = "prompts are read as they are: the model has no chat template"
    if tokenizer.chat_template is not None and not loaded.config.get("is_encoder_decoder"):
        explanation = "prompts are read as they are, without the model's chat template (--raw)"
        if not raw:
            inputs = [
                [{"role": "user", "content": user_prompt}] if isinstance(user_prompt, str) else user_prompt
                for user_prompt in written
            ]
            explanation = "each prompt goes through the model's chat template (--raw reads it as it is)"
    raise_all(
        f"prompt {index}: is a list of messages, which only a chat template can read; leave --raw out"
        for index, prompt in enumerate(inputs)
        if raw and not isinstance(prompt, str)
    )
    print(f"{explanation}; {describe_stop_tokens(checkpoint, tokenizer)}", file=sys.stderr)
    generated = generate_texts(loaded, tokenizer, inputs, adapters=names, **settings)
    columns: dict[str, Sequence[Any]] = {
        "prompt": written,
        "response": generated.texts,
        "token_ids": generated.token_ids,
        "log_probs": generated.log_probs,
        "ended": generated.ended,
        **({"adapter": names or ()} if named else {}),
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _read_file(file: str, adapters: Mapping[str, Path]) -> tuple[list[Any], list[str | None]]:
    """The prompts of a file and the adapter that each row names, where there are adapters; None: none."""
    rows: list[Any] = read_rows(file, "prompts")[0]
    names = [row.extra.get("adapter") if adapters else None for row in rows]
    raise_all(
        f"{row.row_id}: tool definitions are not read here; put them into the system message"
        for row in rows
        if row.tools
    )
    raise_all(
        f"{row.row_id}: there is no adapter {name!r}; --adapters gives {', '.join(adapters)}"
        for row, name in zip(rows, names, strict=True)
        if name not in (None, *adapters)
    )
    return [row.prompt for row in rows], names
