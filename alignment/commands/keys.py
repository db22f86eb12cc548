"""The help on a stage's config: the keys that matter first, all of them, or some whole."""

import re
import textwrap

from alignment.config.load import packaged_names
from alignment.config.schema import ConfigKey, config_keys
from alignment.errors import UserError, suggest
from alignment.pipeline.stages import find_stage

FIRST = {  # stage -> keys that matter first, beside the required ones
    "": (
        "data.train", "adapter", "optim.learning_rate", "training.epochs", "training.max_steps", "training.batch_size",
        "training.micro_batch_tokens", "training.precision", "data.max_length", "weights.quantize",
    ),
    "pretrain": ("model", "tokenizer", "vocabulary", "objective"),
    "sft": ("loss_on", "chat_template"),
    "reward": ("loss", "ensemble", "normalize"),
    "dpo": ("loss", "beta", "reference"),
    "online_dpo": ("reward_model", "rewards", "loss", "beta", "responses_per_prompt", "max_new_tokens"),
    "ppo": ("reward_model", "rewards", "advantages", "responses_per_prompt", "max_new_tokens", "kl_coef", "pretrain_coef"),
    "finetune": ("task", "format"),
    "winrate": ("judge", "reward_model", "max_new_tokens", "temperature", "best_of"),
}  # fmt: skip


def describe_keys(stage: str, width: int, topic: str | None = None) -> str:
    """Describe the packaged configs of a stage and keys of its config, in lines at most `width` wide.

    Args:
        topic: None: the required keys and `FIRST`, a line each. `all`: every key. Else the key or section of that name.

    Raises:
        UserError: there is no such key.
    """
    keys = config_keys(find_stage(stage)[0])
    if topic not in (None, "all"):
        names = {key: re.sub(r"\{.*?\}|\[\]", "", key.name) for key in keys}  # adapter{lora,dora}.rank is adapter.rank
        chosen = [key for key in keys if f".{topic}." in f".{names[key]}."]
        if not chosen:
            raise UserError(f"--help {topic}: there is no such key; {suggest(str(topic), names.values())}")
        return "\n".join(line for key in chosen for line in _lines(key, width))
    names = [name for name in packaged_names("configs") if name.startswith(f"{stage}/")]
    packaged = [*_wrapped(f"packaged configs: {', '.join(names)}", width, ""), ""] if names else []
    if topic == "all":
        lines = [line for key in keys for line in _lines(key, width)]
        return "\n".join([*packaged, "keys of the config, also as key=value:", "", *lines])
    first = {*FIRST[""], *FIRST.get(stage, ())}
    shown = [key for key in keys if key.name in first or (key.default is None and key.name.isidentifier())]
    lines = [textwrap.shorten(f"{_head(key)}: {key.text}", width - 2, placeholder=" ...") for key in shown]
    more = f"`--help KEY` has a key or section whole, `--help all` all {len(keys)} keys"
    return "\n".join(
        [*packaged, "keys that matter first, also as key=value:", "", *(f"  {each}" for each in lines), "", more]
    )


def _head(key: ConfigKey) -> str:
    return f"{key.name} ({'required' if key.default is None else f'default {key.default}'})"


def _lines(key: ConfigKey, width: int) -> list[str]:
    return [*_wrapped(f"{_head(key)}: {key.type}", width, "  "), *_wrapped(key.text, width, "      ")]


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)
