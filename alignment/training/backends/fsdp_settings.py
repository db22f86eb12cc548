"""Checks of the launch file's `fsdp_config`, which Accelerate passes on as FSDP_* variables."""

import os

from alignment.errors import raise_all

# Setting -> supported values (the first one is the default), and the advice for any other value.
# `fsdp_cpu_ram_efficient_loading`, `fsdp_sync_module_states` and `fsdp_use_orig_params` are ignored: Accelerate always
# sends them, and with any value all ranks start with rank 0's weights.
ACCEPTED: dict[str, tuple[tuple[str, ...], str]] = {
    "VERSION": (("2",), "set it to 2, as configs/launch/fsdp2.yaml does"),
    "RESHARD_AFTER_FORWARD": (("true", "false"), "set it to true or false"),
    "OFFLOAD_PARAMS": (("false",), "set it to false, or offload with configs/launch/zero3.yaml"),
    "AUTO_WRAP_POLICY": (("", "transformer_based_wrap"), "leave it out: every block is sharded by itself"),
    "TRANSFORMER_CLS_TO_WRAP": (("",), "leave it out: every block is sharded by itself"),
    "ACTIVATION_CHECKPOINTING": (("false",), "set it to false, and training.gradient_checkpointing=true in the config"),
    "ACTIVATION_CHECKPOINTING_OFFLOAD": (("false",), "set it to false"),
    "FORWARD_PREFETCH": (("false",), "set it to false"),
    "BACKWARD_PREFETCH": (("", "backward_pre"), "leave it out"),
    "IGNORED_MODULES": (("",), "leave it out: every weight is sharded"),
    "STATE_DICT_TYPE": (("", "full_state_dict"), "leave it out: checkpoints hold whole tensors"),
}


def check_fsdp_settings() -> None:
    """Check that all settings have supported values.

    Raises:
        UserError: some have not; all of them are named.
    """
    sent = {name: os.environ.get(f"FSDP_{name}", accepted[0]) for name, (accepted, _) in ACCEPTED.items()}
    raise_all(
        f"launch configuration: fsdp_{name.lower()}: {sent[name]} is not supported; {way_out}"
        for name, (accepted, way_out) in ACCEPTED.items()
        if sent[name].lower() not in accepted
    )


def reshard_after_forward() -> bool:
    """Whether a block's weights are sharded again after its forward (`fsdp_reshard_after_forward`, true by default)."""
    return os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true"
