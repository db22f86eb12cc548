"""H19 and H20: rotary positions and files that are read in part; logits and trained parameters are in test_invariants.py (I9, I11)."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from alignment.errors import UserError
from alignment.models.huggingface.checkpoint import load_language_model
from alignment.models.layers import RotarySpec

POSITIONS = 256


# H19: the layout of rotary positions, their scaling and their precision


def test_h19_angles_stay_in_fp32_in_a_model_of_lower_precision():
    # In bf16 positions 256 and 257 are one number, and an angle of 200 radians is off by up to half a radian.
    spec, positions = RotarySpec(1e4, 32), torch.arange(2 * POSITIONS)
    exact = positions.double()[:, None] * 1e4 ** (-torch.arange(0, 32, 2).double() / 32)
    cast = spec.build()
    cast(positions, len(positions), lambda: positions)  # a table that is there when the model is cast
    for rotary in (spec.build(), spec.build().to(torch.bfloat16), cast.to(torch.bfloat16)):
        cosines, sines = rotary(positions, len(positions), lambda: positions)
        assert_close(cosines[:, 0, :16], exact.cos().float(), atol=1e-4, rtol=0)
        assert_close(sines[:, 0], exact.sin().float(), atol=1e-4, rtol=0)


# H20: files that are read in part, settings that are passed over


def changed(directory, to, *, without="", **keys):
    """A copy of a checkpoint with one tensor less, or with other config keys."""
    config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8")) | keys
    (to / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(Path(directory) / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name != without}
    save_file(kept, to / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_h20_each_tensor_that_a_file_lacks_is_named(family, checkpoints, tmp_path):
    names = list(load_file(Path(checkpoints[family]) / "model.safetensors"))
    assert len(names) > 15
    for name in names:
        changed(checkpoints[family], tmp_path, without=name)
        with pytest.raises(UserError, match=f"tensor {re.escape(name)} is missing"):
            load_language_model(tmp_path)


def test_h20_what_a_config_says_reaches_the_numbers(checkpoints, tmp_path):
    ids = torch.randint(3, 300, (1, 12))
    changed(checkpoints["llama"], tmp_path, rms_norm_eps=0.5)
    with torch.no_grad():
        ours, other = load_language_model(checkpoints["llama"])(ids).logits, load_language_model(tmp_path)(ids).logits
    assert float((ours - other).abs().max()) > 1e-3


def test_h20_a_document_beyond_the_models_positions_is_an_error(checkpoints):
    with pytest.raises(UserError, match="320"), torch.no_grad():
        load_language_model(checkpoints["gpt2"])(torch.full((1, 321), 5))
