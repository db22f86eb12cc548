"""Options in LoRA files of other programs: which are read and which refused. What the tensors tell is files.py's matter."""

import difflib
from typing import Any

# Read, or told by the tensors themselves; any other option must be at peft's default.
READ = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform",
    "layers_pattern", "modules_to_save", "fan_in_fan_out",
}  # fmt: skip
PLAIN_INITS = (True, False, None, "gaussian", "orthogonal", "eva")  # the others change the base model's weights too


def refused_options(config: dict[str, Any]) -> list[str]:
    """What is wrong with an adapter_config.json: options that would change the result and are not done here."""
    from peft import LoraConfig

    defaults = vars(LoraConfig())
    problems = []
    for key, value in config.items():
        if key in READ or not value or value == defaults.get(key):
            continue
        if key not in defaults:
            near = difflib.get_close_matches(key, defaults, 1)
            problems.append(f"{key} is no option that we know" + (f"; is it {near[0]}?" if near else ""))
        elif key != "init_lora_weights":
            problems.append(f"{key} = {value!r} is not supported, only {defaults[key]!r}")
        elif value not in PLAIN_INITS:
            problems.append(
                f"{key} = {value!r} belongs to changed base weights; convert it to plain LoRA with peft first"
            )
    return problems
