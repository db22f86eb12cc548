"""Float32 products by oneDNN: the same numbers as by MKL, only where it is faster, and few different shapes."""

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from alignment.errors import UserError
from alignment.losses.language import TokenLoss, chunked_token_log_probs
from alignment.models import matrix_products, transformer
from alignment.models.build import build_language_model
from alignment.models.heads import target_outputs
from alignment.models.matrix_products import (
    SMALLEST,
    VARIABLE,
    choose_products,
    has_linear,
    onednn_is_faster,
    products_by_mkl,
    products_by_onednn,
    spare_rows,
)
from alignment.ragged import Ragged

needs_onednn = pytest.mark.skipif(not has_linear(), reason="this PyTorch has no oneDNN")


@pytest.fixture
def onednn(monkeypatch):
    """oneDNN multiplies in this test, whatever the processor."""
    monkeypatch.setenv(VARIABLE, "onednn")
    with products_by_mkl():
        choose_products()
        yield
        matrix_products._libraries.clear()


def operations(work) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    return {event.key for event in profiler.key_averages()}


@needs_onednn
@pytest.mark.parametrize("shape", [(304, 200, 100), (704, 3000, 1), (1, 3000, 1000), (2176, 64, 17)])
@pytest.mark.parametrize("biased", [True, False])
def test_products_and_gradients_are_those_of_float64(onednn, shape, biased):
    torch.manual_seed(0)
    rows, inner, columns = shape
    exact = [torch.randn(rows, inner, dtype=torch.float64), torch.randn(columns, inner, dtype=torch.float64)]
    exact += [torch.randn(columns, dtype=torch.float64)] if biased else []

    def gradients(tensors):
        tensors = [tensor.clone().requires_grad_() for tensor in tensors]
        y = F.linear(*tensors)
        y.square().sum().backward()
        return [y.detach(), *(tensor.grad for tensor in tensors)]

    for mine, wanted in zip(gradients([x.float() for x in exact]), gradients(exact), strict=True):
        assert (mine - wanted).abs().max() <= 3e-6 * wanted.abs().max()


@needs_onednn
def test_large_float32_products_go_to_onednn_and_no_others(onednn):
    side = int(SMALLEST ** (1 / 3)) + 16
    side += spare_rows(side)
    a, b = torch.randn(side, side), torch.randn(side, side)
    mine = "mkldnn::_linear_pointwise"
    assert mine in operations(lambda: a @ b)
    assert mine in operations(lambda: F.linear(a, b, torch.zeros(side)))
    assert mine in operations(lambda: torch.randn(side, 8 * side + 3).t() @ b)  # as in the gradient of a weight
    assert mine not in operations(
        lambda: torch.randn(8 * side + 3, side) @ b
    )  # a number of tokens that hardly comes twice
    assert mine not in operations(lambda: a[:16] @ b)  # small
    assert mine not in operations(lambda: a.double() @ b.double())
    assert mine not in operations(lambda: torch.addmm(torch.zeros(side), a, b, beta=0.5))
    assert mine not in operations(lambda: torch.randn(side, 2 * side)[:, ::2] @ b)  # gaps in rows and columns
    with products_by_mkl():
        assert not products_by_onednn()
        assert mine not in operations(lambda: a @ b)
    assert mine in operations(lambda: a @ b)


@needs_onednn
def test_the_gradient_of_a_weight_over_many_tokens_copies_no_transposed_matrix(onednn):
    tokens, convolution = torch.randn(1024, 256), "aten::convolution_backward"
    assert convolution in operations(lambda: tokens.t() @ torch.randn(1024, 128))
    assert convolution not in operations(lambda: tokens[:512].t() @ torch.randn(512, 128))  # too few to be worth it
    assert convolution not in operations(lambda: tokens.t() @ torch.randn(2048, 1024).t())  # both transposed
    assert convolution not in operations(lambda: tokens @ torch.randn(256, 128))


@needs_onednn
@pytest.mark.parametrize("options", [{}, {"entropy": True, "temperature": 0.7}, {"loss": TokenLoss(0.1, 1e-3)}])
def test_a_head_reads_spare_rows_and_gives_what_it_gives_without(options, onednn):
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 500, bias=False)
    states, tokens = torch.randn(1003, 64, requires_grad=True), torch.randint(500, (1003,))
    assert "mkldnn::_linear_pointwise" in operations(lambda: target_outputs(head, states, tokens, **options))

    def outputs_and_gradients(function):
        found = [output for output in function(head, states, tokens, **options) if output is not None]
        total = (torch.stack(found) * torch.linspace(1, 2, 1003)).sum()
        gradients = torch.autograd.grad(total, [states, head.weight])
        return [*found, *gradients]

    found = outputs_and_gradients(target_outputs)
    with products_by_mkl():
        expected = outputs_and_gradients(chunked_token_log_probs)
    for mine, wanted in zip(found, expected, strict=True):
        assert mine.shape == wanted.shape and (mine - wanted).abs().max() <= 3e-6 * wanted.abs().max()


@pytest.mark.parametrize(
    ("vendor", "family", "capability", "expected"),
    [
        ("AuthenticAMD", 26, "AVX512", True),
        ("AuthenticAMD", 25, "AVX512", False),  # Zen 4 computes 512 bits in two halves
        ("GenuineIntel", 26, "AVX512", False),
        ("AuthenticAMD", 26, "AVX2", False),
    ],
)
def test_the_processor_decides(vendor, family, capability, expected, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    processor = tmp_path / "cpuinfo"
    processor.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\n")
    assert onednn_is_faster(processor) is expected
    assert not onednn_is_faster(tmp_path / "missing")
    processor.write_text(f"vendor_id\t: {vendor}\n")
    assert not onednn_is_faster(processor)


@needs_onednn
@pytest.mark.parametrize(("said", "faster", "expected"), [("", True, True), ("", False, False), ("mkl", True, False)])
def test_the_environment_decides_before_the_processor(said, faster, expected, monkeypatch):
    monkeypatch.setenv(VARIABLE, said)
    monkeypatch.setattr(matrix_products, "onednn_is_faster", lambda: faster)
    with products_by_mkl():
        choose_products()
        assert products_by_onednn() is expected
        matrix_products._libraries.clear()


def test_an_unknown_choice_and_one_that_there_is_not_are_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "blas")
    with pytest.raises(UserError, match=r"'blas'.*'mkl' or 'onednn'"):
        choose_products()
    monkeypatch.setenv(VARIABLE, "onednn")
    monkeypatch.setattr(matrix_products, "has_linear", lambda: False)
    with pytest.raises(UserError, match="has no linear layer of oneDNN"):
        choose_products()


def test_spare_rows_are_few_and_make_few_numbers():
    assert all(0 <= spare_rows(rows) <= max(15, rows // 16) for rows in range(1, 5000))
    assert len({rows + spare_rows(rows) for rows in range(1024, 2048)}) == 17


LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
BLOOM = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4}
MODELS = {"llama": LLAMA, "gpt2": GPT2, "bloom": BLOOM}


def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 60, (length,), generator=generator).tolist() for length in (9, 31, 17, 4)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shared", [False, True])
def test_spare_rows_change_no_number(name, shared, monkeypatch):
    torch.manual_seed(0)
    model = build_language_model({"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, **MODELS[name]})
    rows = [[5, 6, 7, 8, *row] for row in documents()]
    batch = (
        Ragged.build_shared(rows, [[False] * 4 + [True] * (len(row) - 4) for row in rows], [[0, 1, 2, 3]])
        if shared
        else Ragged.build(rows)
    )
    seen: list[int] = []
    run = transformer.Transformer._run
    monkeypatch.setattr(transformer.Transformer, "_run", lambda self, x, c: (seen.append(len(x)), run(self, x, c))[1])

    def found():
        model.zero_grad()
        log_probs = model(batch=batch).log_probs
        log_probs.sum().backward()
        return [log_probs.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    results = []
    for active in (False, True):
        monkeypatch.setattr(transformer, "products_by_onednn", lambda active=active: active)
        results.append(found())
    assert seen == [len(batch.tokens), len(batch.tokens) + spare_rows(len(batch.tokens))]
    assert spare_rows(len(batch.tokens)) > 0
    for with_spare, plain in zip(*results, strict=True):
        torch.testing.assert_close(with_spare, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_spare_rows_reach_neither_a_cache_nor_whole_documents(name, monkeypatch):
    torch.manual_seed(0)
    model = build_language_model({"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, **MODELS[name]}).eval()
    batch = Ragged.build(documents())
    results = []
    for active in (False, True):
        monkeypatch.setattr(transformer, "products_by_onednn", lambda active=active: active)
        cache = model.new_cache(4, 40)
        logits = model.prefill(batch, cache)
        states = model.hidden_states(model.trunk, batch)
        assert len(states) == len(batch.tokens)
        results.append([logits, model.decode(logits.argmax(-1), cache), states.detach(), *cache.keys, *cache.values])
    for with_spare, plain in zip(*results, strict=True):
        torch.testing.assert_close(with_spare, plain, rtol=1e-4, atol=1e-5)


def test_a_batch_that_is_one_rectangle_gets_no_spare_rows(monkeypatch):
    model = build_language_model({"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, **LLAMA})
    monkeypatch.setattr(transformer, "products_by_onednn", lambda: True)
    assert not model.trunk._takes_spare_rows(Ragged.build([[5, 6, 7]] * 3))
    assert model.trunk._takes_spare_rows(Ragged.build([[5, 6, 7], [5]]))
