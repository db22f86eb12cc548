"""Several adapters in one batch: every document is read as by the model with its adapter alone, and the base stays as it is."""

import pytest
import torch
from torch.testing import assert_close

from alignment.adapters import (
    BottleneckSpec,
    DoRASpec,
    IA3Spec,
    LoRASpec,
    PrefixSpec,
    PromptSpec,
    attach,
    load_adapter,
    load_adapters,
    save_adapter,
)
from alignment.errors import UserError
from alignment.generation import DecodingEngine, DecodingRequest, SamplingConfig, decode_responses
from alignment.models.huggingface.checkpoint import load_language_model, load_pretrained
from alignment.ragged import Ragged
from tests.adapters.tiny_models import TIGHT, disturb, write

SPECS = {
    "small": LoRASpec(rank=2, alpha=3, layers=r"attention\.(query|value)"),
    "large": LoRASpec(rank=8, alpha=8, rank_pattern={r"blocks\.0\.feedforward\.down": 4}, layers=r"feedforward\.(up|down)|output"),
    "prefix3": PrefixSpec(tokens=3),
    "prefix7": PrefixSpec(tokens=7),
    "prompt5": PromptSpec(tokens=5),
}  # fmt: skip
GENERATOR = torch.Generator().manual_seed(5)
DOCUMENTS = [torch.randint(3, 101, (size,), generator=GENERATOR).tolist() for size in (9, 4, 12, 9, 1, 7, 5, 2)]
NAMES = ["prefix7", "small", None, "large", "prefix3", "prompt5", "small", None]
FAMILIES = ["llama", "gpt2", "gemma3_text"]  # rotary, learned positions, sliding windows


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(family)` -> directory of the base, and of each adapter by its name."""
    made = {}

    def save(family):
        if family not in made:
            base = tmp_path_factory.mktemp(family)
            write(family, base)
            for seed, (name, spec) in enumerate(SPECS.items()):
                torch.manual_seed(seed)
                model = disturb(attach(load_language_model(base), spec), seed=seed)
                save_adapter(model, base / name, base=str(base))
            made[family] = base, {name: base / name for name in SPECS}
        return made[family]

    return save


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def mixed(saved, family):
    """The base with all adapters."""
    base, directories = saved(family)
    return load_adapters(load_language_model(base), directories).eval()


@pytest.fixture
def alone(saved, family):
    """`alone(name)` -> the base with one adapter as ever, None: without."""
    base, directories = saved(family)

    def load(name):
        model = load_language_model(base)
        return (model if name is None else load_adapter(model, directories[name])).eval()

    return load


@torch.no_grad()
def test_log_probs_of_each_document_equal_those_of_its_adapter_alone(mixed, alone):
    with mixed.using_adapters(NAMES):
        found = mixed(batch=Ragged.build(DOCUMENTS)).log_probs
        logits = mixed(torch.tensor([[5, 9, 44, 3]] * len(NAMES))).logits
    wanted = torch.cat(
        [alone(name)(batch=Ragged.build([each])).log_probs for name, each in zip(NAMES, DOCUMENTS, strict=True)]
    )
    assert_close(found, wanted, **TIGHT)
    every = torch.cat([alone(name)(torch.tensor([[5, 9, 44, 3]])).logits for name in NAMES])
    assert_close(logits, every, **TIGHT)
    assert len({round(x, 3) for x in every[:, -1, 0].tolist()}) == len(set(NAMES))  # every adapter does something
    assert torch.equal(mixed(torch.tensor([[5, 9]])).logits, alone(None)(torch.tensor([[5, 9]])).logits)


def greedy(model, prompt, count=12):
    """The tokens of one response, computed whole again for every token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def test_rows_that_come_and_go_decode_as_with_their_adapter_alone(mixed, alone):
    """11 requests in 3 cache rows, of different lengths; equal prompts of two adapters are not shared."""
    asked = [
        *zip(NAMES, DOCUMENTS, strict=True),
        ("prefix3", DOCUMENTS[0]),
        ("large", DOCUMENTS[0]),
        ("large", DOCUMENTS[0]),
    ]
    wanted = [greedy(alone(name), prompt) for name, prompt in asked]
    engine, numbers, found = DecodingEngine(mixed, max_rows=3), {}, {}
    for index, (name, prompt) in enumerate(asked):
        sampling = SamplingConfig(12 - index % 5, temperature=0)
        numbers[engine.add(DecodingRequest(prompt, sampling, adapter=name))] = index
        for event in engine.step() if index > 4 else ():  # some come while others run
            found.setdefault(numbers[event.request], []).append(event)
    while engine.unfinished:
        for event in engine.step():
            found.setdefault(numbers[event.request], []).append(event)
    for index, tokens in enumerate(wanted):
        assert [event.token for event in found[index]] == tokens[: 12 - index % 5]


@torch.no_grad()
def test_a_fixed_set_of_prompts_decodes_with_an_adapter_each(mixed, alone):
    sampling = SamplingConfig(10, temperature=0.8, seed=3)
    found = decode_responses(mixed, DOCUMENTS, sampling, [2], adapters=NAMES, batch_size=4)
    for row, (name, prompt) in enumerate(zip(NAMES, DOCUMENTS, strict=True)):
        by_itself = decode_responses(alone(name), [prompt], sampling, [2], rows=[row])
        assert found.token_ids[row] == by_itself.token_ids[0]
        assert_close(found.log_probs[row], by_itself.log_probs[0], **TIGHT)


def test_the_base_stays_as_it_is_and_there_is_one(saved):
    base, directories = saved("llama")
    model = load_language_model(base)
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    load_adapters(model, directories)
    decode_responses(model.eval(), DOCUMENTS, SamplingConfig(3), [], adapters=NAMES)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(after[name].data_ptr() == place for name, (place, _) in before.items())
    assert all(torch.equal(after[name], value) for name, (_, value) in before.items())


# Refusals


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (DoRASpec(rank=2), "is dora, and only lora, prefix and prompt"),
        (IA3Spec(), "is ia3, and only"),
        (BottleneckSpec(width=4), "is bottleneck, and only"),
        (
            LoRASpec(rank=2, token_rows=(5, 7)),
            "replaces base_model.model.model.embed_tokens.*, of which a batch has one",
        ),
        (LoRASpec(rank=2, modules_to_save=("norm",)), "replaces base_model.model.model.norm.weight"),
        (LoRASpec(rank=2, layers="head"), "adapters.odd: head does not read the tokens of whole documents"),
    ],
)
def test_what_acts_on_no_single_document_is_refused_at_load(saved, tmp_path, spec, why):
    base, directories = saved("llama")
    save_adapter(attach(load_language_model(base), spec), tmp_path, base=str(base))
    with pytest.raises(UserError, match=why):
        load_adapters(load_language_model(base), {"small": directories["small"], "odd": tmp_path})


def test_an_adapter_with_nan_is_refused(saved, tmp_path):
    base, _ = saved("llama")
    model = attach(load_language_model(base), PrefixSpec(tokens=2))
    model.prefix.embedding.weight.data[1, 3] = torch.nan
    save_adapter(model, tmp_path, base=str(base))
    with pytest.raises(UserError, match="prompt_embeddings holds NaN or infinity"):
        load_adapters(load_language_model(base), {"odd": tmp_path})


def test_models_that_take_one_adapter_are_refused(saved, tmp_path):
    base, directories = saved("llama")
    adapted = load_adapter(load_language_model(base), directories["small"])
    with pytest.raises(UserError, match="has an adapter already"):
        load_adapters(adapted, directories)
    with pytest.raises(UserError, match="has an adapter already"):
        load_adapters(load_adapters(load_language_model(base), directories), directories)
    for name in ("stablelm", "t5"):
        write(name, tmp_path / name)
        with pytest.raises(UserError, match=f"need a decoder of this library, and '{name}' is none"):
            load_adapters(load_pretrained(tmp_path / name), directories)


def test_unknown_names_and_wrong_counts_are_refused(saved):
    base, directories = saved("llama")
    model = load_adapters(load_language_model(base), {"small": directories["small"]})
    with pytest.raises(UserError, match="there is no adapter 'smal'; small is loaded"):
        DecodingEngine(model.eval()).add(DecodingRequest([5], adapter="smal"))
    with pytest.raises(UserError, match="none is loaded"):
        DecodingEngine(load_language_model(base).eval()).add(DecodingRequest([5], adapter="small"))
    with model.using_adapters(["small"]), pytest.raises(ValueError, match="1 adapters are named for 2 documents"):
        model(torch.tensor([[5, 9], [4, 3]]))


def test_a_row_behind_a_prefix_has_fewer_positions(saved):
    """64 positions: 57 tokens behind 7, and all 64 without."""
    base, directories = saved("llama")
    engine = DecodingEngine(load_adapters(load_language_model(base), directories).eval())
    engine.add(DecodingRequest([5] * 50, SamplingConfig(7), adapter="prefix7"))
    engine.add(DecodingRequest([5] * 50, SamplingConfig(14)))
    with pytest.raises(UserError, match="65 tokens"):
        engine.add(DecodingRequest([5] * 50, SamplingConfig(8), adapter="prefix7"))
    assert len(engine.run()) == 2
