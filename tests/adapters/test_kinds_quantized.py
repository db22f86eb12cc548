"""Every kind of adapter on a base in NF4 and in int8: trained, saved, loaded here and in peft, switched off."""

import pytest
import torch
from torch.testing import assert_close

from alignment import load_model
from alignment.adapters import (
    BottleneckSpec,
    DoRASpec,
    IA3Spec,
    LoRASpec,
    PrefixSpec,
    PromptSpec,
    attach,
    disabled,
    load_adapter,
    load_adapters,
    merge_adapter,
    save_adapter,
)
from alignment.adapters.lora import lora_layers
from alignment.errors import UserError
from alignment.models import quantization
from alignment.models.huggingface.checkpoint import save_model
from tests.adapters.tiny_models import disturb, inputs, train, training_batch, write

pytest.importorskip("bitsandbytes")
KINDS = {
    "lora": LoRASpec(rank=3, alpha=6.0),
    "dora": DoRASpec(rank=2, alpha=4.0),
    "ia3": IA3Spec(),
    "pissa": LoRASpec(rank=2, alpha=4.0, init="pissa"),
    "token rows": LoRASpec(rank=2, token_rows=(3, 9, 100)),
    "modules": LoRASpec(rank=2, modules_to_save=("model.norm",)),
    "prompt": PromptSpec(tokens=3),
    "prefix": PrefixSpec(tokens=3),
    "bottleneck": BottleneckSpec(width=4, placement="houlsby"),
}
RARE = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "stablelm")]  # the last is transformers' class
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # rows of whole blocks of 64 numbers
IN_PEFT = ("lora", "dora", "ia3", "token rows", "modules")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """`bases(name)` -> directory of a random model, each made once."""
    made = {}

    def base(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            write(name, made[name], **SIZES)
        return str(made[name])

    return base


def spec_of(kind, name):
    if kind == "ia3" and name == "stablelm":  # peft has no layers of its own choice there
        return IA3Spec(layers=("k_proj", "v_proj"), feedforward=("down_proj",))
    return KINDS[kind]


@torch.no_grad()
def logits(model, name):
    return model.eval()(inputs(name)["input_ids"]).logits


def stored(model):
    """The quantized numbers of the base, by the names of the model without an adapter."""
    layers = {name: each for name, each in model.named_modules() if quantization.is_quantized(each)}
    return {name.removesuffix(".base_layer"): each.weight.data.clone() for name, each in layers.items()}


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
@pytest.mark.parametrize("name", ["llama", *RARE])
@pytest.mark.parametrize("kind", KINDS)
def test_trained_saved_loaded_and_switched_off(bases, tmp_path, kind, name, quantize):
    base, spec = bases(name), spec_of(kind, name)
    untouched = load_model(base, quantize=quantize)
    before, plain = stored(untouched), logits(untouched, name)
    torch.manual_seed(1)
    model = attach(load_model(base, quantize=quantize), spec)
    if kind in ("lora", "dora", "ia3", "token rows", "modules"):
        assert_close(logits(model, name), plain, atol=1e-5, rtol=0)
    if kind == "pissa":
        assert_close(logits(model, name), plain, atol=1e-4, rtol=0)
    losses = train(model, lambda model: -model(batch=training_batch(name)).log_probs.mean(), 12, 1e-2)
    assert losses[-1] < losses[0] - 0.02, losses
    trained, after = logits(model, name), stored(model)
    assert before.keys() == after.keys() and all(torch.equal(before[each], after[each]) for each in before)
    save_adapter(model, tmp_path, base=base)
    again = load_adapter(load_model(base, quantize=quantize), tmp_path)
    assert_close(logits(again, name), trained, atol=1e-5 if kind == "pissa" else 1e-6, rtol=0)
    with disabled(model):
        assert torch.equal(logits(model, name), plain)
    assert torch.equal(logits(model, name), trained)
    assert (trained - plain).abs().max() > 1e-2


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
@pytest.mark.parametrize("sizes", [SIZES, {}], ids=["whole blocks", "parts of blocks"])
def test_norms_of_dora_and_pissa_are_of_the_dequantized_matrix(tmp_path, sizes, quantize):
    write("llama", tmp_path, **sizes)
    dora, pissa = (
        next(iter(lora_layers(attach(load_model(str(tmp_path), quantize=quantize), KINDS[kind])).values()))
        for kind in ("dora", "pissa")
    )
    matrix = quantization.dequantized(dora.get_base_layer())
    assert_close(dora.lora_magnitude_vector["default"].weight, matrix.norm(dim=1), atol=1e-5, rtol=0)
    product = pissa.scaling["default"] * pissa.lora_B["default"].weight @ pissa.lora_A["default"].weight
    left, sizes, right = torch.linalg.svd(matrix)
    assert_close(product, left[:, :2] * sizes[:2] @ right[:2], atol=1e-5, rtol=0)


def nf4_of_transformers(base):
    """The base as transformers quantizes it."""
    import transformers

    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    for module in model.modules():  # bitsandbytes' path for CPUs with bfloat16 instructions computes in bfloat16
        module.support_avx512bf16_for_cpu = False
    return model


def int8_values(base, folder):
    """The base with the values of the int8 matrices; transformers' own int8 layers round every input too."""
    import transformers

    rounded = load_model(base)
    quantization.round_blocks(rounded, "int8")
    save_model(rounded, folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("quantize", ["nf4", "int8"])
@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", IN_PEFT)
def test_an_adapter_of_a_quantized_base_opens_in_peft(bases, tmp_path, kind, name, quantize):
    from peft import PeftModel

    base = bases(name)
    torch.manual_seed(1)
    model = attach(load_model(base, quantize=quantize), KINDS[kind])
    plain = logits(model, name)
    disturb(model, size=0.05)
    save_adapter(model, tmp_path / "adapter", base=base)
    trained = logits(model, name)
    assert (trained - plain).abs().max() > 1e-2
    peer = nf4_of_transformers(base) if quantize == "nf4" else int8_values(base, tmp_path / "rounded")
    theirs = PeftModel.from_pretrained(peer, str(tmp_path / "adapter"))
    assert_close(logits(theirs, name), trained, atol=1e-4, rtol=0)


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_merging_into_quantized_weights_is_refused(bases, kind, quantize):
    model = attach(load_model(bases("llama"), quantize=quantize), KINDS[kind])
    with pytest.raises(UserError, match=f"cannot be merged into weights in {quantize}.*alignment export"):
        merge_adapter(model)


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
@torch.no_grad()
def test_several_adapters_over_one_quantized_base_act_as_each_alone(bases, tmp_path, quantize):
    directory = bases("llama")
    for seed, kind in enumerate(("lora", "prefix")):
        adapted = disturb(attach(load_model(directory, quantize=quantize), KINDS[kind]), seed=seed)
        save_adapter(adapted, tmp_path / kind, base=directory)
    names, model = ["lora", None, "prefix"], load_model(directory, quantize=quantize)
    load_adapters(model, {name: tmp_path / name for name in ("lora", "prefix")})
    ids = inputs("llama")["input_ids"][:1]
    with model.using_adapters(names):
        found = model(ids.repeat(3, 1)).logits
    for row, name in enumerate(names):
        alone = load_model(tmp_path / name if name else directory, quantize=quantize)
        assert_close(found[row], alone(ids).logits[0], atol=1e-4, rtol=0)
