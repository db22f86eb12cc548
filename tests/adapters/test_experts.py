"""LoRA on mixtures of experts: by default every linear layer but the router, and peft opens the file."""

import pytest
import torch
from torch.testing import assert_close

from alignment.adapters import LoRASpec, attach, save_adapter
from alignment.loading import load_model
from alignment.models.build import build_language_model
from alignment.models.huggingface.checkpoint import load_language_model, save_model
from tests.adapters.conftest import disturb

MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(0)
    save_model(build_language_model(MIXTRAL), directory)
    return directory


def test_every_linear_layer_but_the_router_is_adapted(mixtral):
    model = attach(load_language_model(mixtral), LoRASpec(rank=2))
    blocks = {name for name, module in model.trunk.blocks.named_modules() if isinstance(module, torch.nn.Linear)}
    bare = {name for name in blocks if not name.endswith(("base_layer", "lora_A.default", "lora_B.default"))}
    assert bare == {"0.feedforward.router", "1.feedforward.router"}


def test_an_adapter_on_every_expert_opens_here_and_in_peft(mixtral, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = disturb(attach(load_language_model(mixtral), LoRASpec(rank=2))).eval()
    save_adapter(model, tmp_path, base=str(mixtral))
    ids = torch.randint(61, (2, 19), generator=torch.Generator().manual_seed(4))
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(mixtral), tmp_path).eval()
    with torch.no_grad():
        wanted = model(ids).logits
        assert torch.equal(load_model(str(tmp_path))(ids).logits, wanted)
        assert_close(theirs(ids).logits, wanted, atol=1e-4, rtol=0)
