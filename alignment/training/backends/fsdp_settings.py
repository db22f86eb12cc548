"""What the launch file's `fsdp_config` may say: honored, or refused by name. Accelerate hands it over as FSDP_* variables."""

import os

from alignment.errors import raise_all

# Setting -> values that agree with what sharded.py does (the first is what leaving it out means), and the way out.
# `fsdp_cpu_ram_efficient_loading`, `fsdp_sync_module_states` and `fsdp_use_orig_params` are not here: Accelerate always
# sends them, and with any value all ranks start from rank 0's weights.
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
    """Compare the settings that were sent with those that FSDP2 is used with.

    Raises:
        UserError: some ask for something else; all of them are named.
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
