"""Longformer and BigBird: who sees whom, transformers' random blocks, and a cost that grows with the length alone."""

from typing import Any

import pytest
import torch
import transformers
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

from alignment.errors import UserError
from alignment.models.build import build_model
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.models.layers import AttentionSpec
from alignment.models.layers.sparse import BlockSparseSpec, random_blocks
from alignment.ragged import Ragged

from .tiny import TINY, written_by_transformers

SEPARATOR = 4
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def written(model_type: str, kind: str, directory: Any, **changes: Any) -> Any:
    return written_by_transformers(
        {"model_type": model_type, **TINY[model_type], **changes}, directory, f"AutoModelFor{kind}"
    )


def rows_of(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids [B, T], three separators in each, and their mask."""
    ids = torch.randint(5, 61, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    for row, length in enumerate(lengths):
        ids[row, [length // 3, length // 3 + 1, length - 1]] = SEPARATOR
        ids[row, length:] = 1
    return ids, (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


@pytest.mark.parametrize(
    ("kind", "task"),
    [("MaskedLM", "language"), ("SequenceClassification", "sequence"), ("TokenClassification", "tokens")],
)
@torch.no_grad()
def test_a_mask_chooses_longformers_global_tokens_as_in_transformers(kind, task, tmp_path):
    reference = written("longformer", kind, tmp_path)
    model = load_pretrained(tmp_path, task)
    ids, mask = rows_of(60, 13, 41)
    chosen = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.2).long() * mask
    chosen[1] = 0
    theirs = reference(ids, mask, global_attention_mask=chosen).logits
    ours = model(ids, mask, global_attention_mask=chosen).logits
    if task != "sequence":
        theirs = theirs * mask[..., None]
    assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert (ours - model(ids, mask).logits).abs().max() > 0.01


def test_a_global_mask_for_another_encoder_is_refused():
    ids = torch.full((1, 4), 7)
    with pytest.raises(UserError, match="only a Longformer has global tokens"):
        build_model({"model_type": "bert", **TINY["bert"]})(ids, global_attention_mask=torch.ones_like(ids))


@torch.no_grad()
def test_answers_of_big_bird_without_token_types_are_transformers(tmp_path):
    reference = written("big_bird", "QuestionAnswering", tmp_path)
    model = load_pretrained(tmp_path, "span")
    for length in (64, 20):
        ids, mask = rows_of(length)
        reference.bert.set_attention_type("block_sparse")
        output = reference(ids, mask)
        assert_close(model(ids).logits, torch.stack([output.start_logits, output.end_logits], -1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["longformer", "big_bird"])
def test_a_question_without_a_separator_is_refused(model_type):
    model = build_model({"model_type": model_type, **TINY[model_type]}, "span")
    with pytest.raises(UserError, match="no separator 4 between question and context"):
        model(batch=Ragged.build([[7, SEPARATOR, 8], [7, 8, 9]]))


@pytest.mark.parametrize(("block", "random", "blocks"), [(2, 1, 8), (4, 2, 11), (16, 3, 64), (64, 3, 16), (64, 3, 48)])
def test_random_blocks_are_those_of_transformers(block, random, blocks, monkeypatch):
    """Lengths of 1,024 and 3,072 tokens have a plan of their own, within 4,096 positions here."""
    config = transformers.BigBirdConfig(
        hidden_size=12, num_attention_heads=3, block_size=block, num_random_blocks=random, max_position_embeddings=4096
    )
    theirs, length = BigBirdBlockSparseAttention(config, seed=5).train(), block * blocks
    seen = []

    def spy(keys, chosen):
        seen.append(chosen[0])
        raise StopIteration

    monkeypatch.setattr(theirs, "torch_gather_b2", spy)
    with pytest.raises(StopIteration):
        ones = torch.ones(1, blocks, block)
        theirs(torch.zeros(1, length, 12), from_blocked_mask=ones, to_blocked_mask=ones)
    spec = BlockSparseSpec(AttentionSpec(3, 3, 4, 0.5, True, True), block, random, 4096, seed=5)
    assert random_blocks(spec, blocks).tolist() == seen[0].tolist()


@pytest.mark.parametrize(("length", "changes"), [(61, {}), (1024, {"max_position_embeddings": 1040, "block_size": 32})])
def test_training_reads_transformers_random_blocks(length, changes, tmp_path):
    reference = written("big_bird", "MaskedLM", tmp_path, **NO_DROPOUT, **changes)
    model = load_pretrained(tmp_path)
    ids, _ = rows_of(length)
    trained = model.train()(ids).logits
    assert_close(trained, reference.train()(ids).logits, atol=1e-5, rtol=1e-5)
    assert (trained - model.eval()(ids).logits).abs().max() > 0.01


@torch.no_grad()
def test_documents_of_big_bird_do_not_depend_on_the_batch(tmp_path):
    """Blocks of 4, one of them random: up to 28 tokens all see each other."""
    model = build_model({"model_type": "big_bird", **TINY["big_bird"]})
    documents = [list(range(5, 5 + length)) for length in (50, 3, 29, 28, 41)]
    together = model(batch=Ragged.build(documents)).log_probs.split([length - 1 for length in map(len, documents)])
    for document, found in zip(documents, together, strict=True):
        assert_close(found, model(batch=Ragged.build([document])).log_probs, atol=1e-5, rtol=1e-5)


class LargestTensor(TorchDispatchMode):
    """The most elements that a tensor has within the block."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor):
            self.elements = max(self.elements, output.numel())
        return output


@pytest.mark.parametrize(("model_type", "task"), [("longformer", "sequence"), ("big_bird", "language")])
def test_no_tensor_grows_faster_than_the_length(model_type, task):
    model = build_model({"model_type": model_type, **TINY[model_type], "max_position_embeddings": 2050}, task)
    largest = []
    for length in (512, 1024, 2048):
        with LargestTensor() as mode:
            output = model(batch=Ragged.build([[7] * length]))
            (output.logits if task == "sequence" else output.log_probs).sum().backward()
        largest.append(mode.elements)
    assert largest[1] <= 2 * largest[0] and largest[2] <= 2 * largest[1]
    assert largest[2] < 2048**2 / 4


def test_the_embedding_of_big_bird_is_normed_after_its_dropout():
    model = build_model({"model_type": "big_bird", **TINY["big_bird"], "hidden_dropout_prob": 0.5}).train()
    ids = torch.arange(5, 25)
    embedded = model.trunk.embedded(ids, torch.arange(20), None)
    assert_close(embedded.mean(-1), torch.zeros(20), atol=1e-5, rtol=0)
    assert (embedded != 0).all() and not torch.equal(embedded, model.trunk.embedded(ids, torch.arange(20), None))
