"""The process group that a launcher asks for: settings that are not honored are refused by name."""

import pytest

from alignment.errors import UserError
from alignment.training.distributed import init_distributed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("offload_params", "nvme"), ("auto_wrap_policy", "SIZE_BASED_WRAP"), ("transformer_cls_to_wrap", "GPT2Block"),
        ("activation_checkpointing", "true"), ("forward_prefetch", "2"),
        ("sharding_strategy", "SHARD_GRAD_OP"), ("reshard_after_forward", "FULL_SHARD"),
        ("ignored_modules", "head"), ("state_dict_type", "LOCAL_STATE_DICT"), ("version", "1"),
    ],
)  # fmt: skip
def test_a_launch_setting_that_is_not_honored_is_refused(monkeypatch, name, value):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv(f"FSDP_{name.upper()}", value)
    with pytest.raises(UserError, match=rf"launch configuration: fsdp_{name}: {value} is not supported; "):
        init_distributed()
