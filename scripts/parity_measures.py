"""What the parity script measures on one checkpoint: logits, gradients, export, generation, refusals, heads."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from parity_reference import (
    DOORS,
    HEAD_DOORS,
    Case,
    documents,
    filler_of,
    generated,
    logits_of,
    outputs_of,
    padded,
    segments_of,
    targets_of,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from alignment.errors import UserError
from alignment.generation.beam_search import BeamConfig, beam_search
from alignment.generation.engine import decode_responses
from alignment.generation.sampling import SamplingConfig
from alignment.models.huggingface.checkpoint import hf_locations, load_pretrained, save_model, to_hf
from alignment.ragged import Ragged, Seq2Seq

GRADIENT_LENGTHS = (60, 33, 7, 90, 16)
PROMPT_LENGTHS = (1, 2, 3, 5, 8, 13, 17, 21, 24, 29, 30, 34, 38, 41, 47, 55)
GRADIENT_FLOOR = 1e-2  # of the largest gradient in the model: below, rounding alone would be a large share


def our_logits(
    case: Case, model: Any, side: str, rows: list[list[int]], targets: list[list[int]] | None = None
) -> Tensor:
    """Our logits of a batch padded on `side`, at real tokens, [N, V]; padding is filled with another token than theirs."""
    ids, mask = padded(rows, side, 7)
    if targets is not None:
        target_ids, target_mask = padded(targets, side, 7)
        more = {"decoder_input_ids": target_ids, "decoder_attention_mask": target_mask}
        return model(ids, mask, **more).logits[target_mask.bool()]
    more = {"token_type_ids": padded(segments_of(rows), side, 0)[0]} if case.token_types else {}
    return model(ids, mask, **more).logits[mask.bool()]


def ragged(case: Case, rows: list[list[int]], targets: list[list[int]] | None = None) -> Any:
    """The same documents as our batch form; an encoder is asked for every token."""
    batch = Ragged.build(rows)
    if targets is not None:
        return Seq2Seq(batch, Ragged.build(targets))
    if case.kind == "decoder":
        return batch
    everything = torch.arange(len(batch.tokens))
    segments = torch.tensor([s for row in segments_of(rows) for s in row]) if case.token_types else None
    return Ragged(
        batch.tokens, batch.positions, batch.starts, batch.lengths, everything,
        torch.repeat_interleave(batch.sizes), float(len(everything)),
        labels=batch.tokens, segments=segments,
    )  # fmt: skip


def target_log_probs(case: Case, logits: Tensor, batch: Any) -> Tensor:
    """What `model(batch=...)` should give, from logits at all tokens [N, V]."""
    part = batch.decoder if isinstance(batch, Seq2Seq) else batch
    rows = part.target_index - (0 if case.kind == "encoder" else 1)
    return logits[rows].log_softmax(-1).gather(-1, part.tokens[part.target_index, None]).squeeze(-1)


@torch.no_grad()
def logit_differences(case: Case, reference: Any, model: Any) -> dict[str, float]:
    """Largest |difference| of logits for each way to run the model, and of the batch call's log-probabilities."""
    rows = documents(case)
    targets = targets_of(case, reference) if case.kind == "seq2seq" else None
    found = {}
    for side in ("left", "right"):
        theirs = logits_of(case, reference, side, rows, targets)
        found[side] = _largest(our_logits(case, model, side, rows, targets) - theirs)
    batch = ragged(case, rows, targets)
    alone = logits_of(case, reference, "right", rows, targets)
    found["ragged"] = _largest(model(batch=batch).log_probs - target_log_probs(case, alone, batch))
    if case.kind != "encoder":
        found["cache"] = decoding_difference(case, reference, model, rows, targets)
    return found


def decoding_difference(
    case: Case, reference: Any, model: Any, rows: list[list[int]], targets: list[list[int]] | None, steps: int = 40
) -> float:
    """Prefill and then `steps` tokens one by one, each row at its own place, against transformers' whole forward."""
    pairs = [(row, target) for row, target in zip(rows, targets or rows, strict=True) if len(target) > steps]
    sources, written = [row for row, _ in pairs], [target for _, target in pairs]
    theirs = [logits_of(case, reference, "right", [row], targets and [target]) for row, target in pairs]
    begins = [len(row) - steps for row in written]
    cache = model.new_cache(len(written), max(map(len, written)))
    beginning = Ragged.build([row[:-steps] for row in written])
    ours = [model.prefill(Seq2Seq(Ragged.build(sources), beginning) if targets else beginning, cache)]
    for step in range(steps):
        tokens = torch.tensor([row[begin + step] for row, begin in zip(written, begins, strict=True)])
        ours.append(model.decode(tokens, cache))
    expected = torch.stack([logits[begin - 1 :] for logits, begin in zip(theirs, begins, strict=True)], dim=1)
    return _largest(torch.stack(ours) - expected)


def gradient_difference(case: Case, reference: Any, model: Any, directory: Path) -> float:
    """Largest error of any parameter's gradient, as a share of that tensor's largest gradient.

    loss = sum of random weights times logits (a padded call) and times log-probabilities (a batch call)

    A tensor whose gradients are all below `GRADIENT_FLOOR` of the largest in the model is measured by that floor: some
    are truly zero (a key's bias moves all scores of a query alike), and there both sides give rounding noise. What
    transformers saves though it acts on nothing may be missing on our side.
    """
    lengths = tuple(min(length, case.lengths[0]) for length in GRADIENT_LENGTHS)
    rows = documents(case, lengths)
    start = reference.config.decoder_start_token_id if case.kind == "seq2seq" else None
    targets = [[start, *row[1:]] for row in documents(case, lengths[::-1], seed=2)] if start is not None else None
    batch = ragged(case, rows, targets)

    def loss(logits: Tensor, log_probs: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return sum((torch.randn(x.shape, generator=generator) * x).sum() for x in (logits, log_probs))  # type: ignore

    loss(our_logits(case, model, "right", rows, targets), model(batch=batch).log_probs).backward()
    logits = logits_of(case, reference, "right", rows, targets)
    loss(logits, target_log_probs(case, logits, batch)).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    ours, theirs = to_hf(gradients, hf_locations(model)), gradients_as_saved(reference, directory)
    theirs = {name: gradient for name, gradient in theirs.items() if name in ours or gradient.any()}
    if missing := {name for name, gradient in theirs.items() if gradient.any()} - ours.keys():
        raise UserError(f"no gradient of ours for {sorted(missing)}")
    floor = GRADIENT_FLOOR * max(_largest(gradient) for gradient in theirs.values())
    shared = theirs.keys() & ours.keys()  # a tensor that its model never uses may have no place in ours
    return max(_largest(ours[name] - theirs[name]) / max(_largest(theirs[name]), floor) for name in shared)


def gradients_as_saved(reference: Any, directory: Path) -> dict[str, Tensor]:
    """transformers' gradients under the names its files have, which are not always those in memory."""
    kept = {name: tensor.detach().clone() for name, tensor in reference.state_dict().items()}
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    reference.save_pretrained(directory)
    reference.load_state_dict(kept)
    buffers = {name for name, _ in reference.named_buffers()}
    saved = load_file(directory / "model.safetensors")
    return {name: tensor for name, tensor in saved.items() if name not in buffers}


@torch.no_grad()
def export_difference(case: Case, reference: Any, model: Any, directory: Path) -> float:
    """Largest |difference| of logits between the model transformers wrote and the one it reads from our export."""
    save_model(model, directory)
    again = getattr(transformers, DOORS[case.kind]).from_pretrained(directory).eval()
    rows = documents(case)
    targets = targets_of(case, reference) if case.kind == "seq2seq" else None
    theirs = logits_of(case, reference, "right", rows, targets)
    return _largest(logits_of(case, again, "right", rows, targets) - theirs)


def generation_differences(case: Case, reference: Any, model: Any, steps: int = 16) -> dict[str, int]:
    """On how many prompts each search finds other tokens than transformers' own."""
    lengths = tuple(min(length, case.lengths[0] - steps) for length in PROMPT_LENGTHS)
    prompts, start = documents(case, lengths, seed=4), None
    if case.kind == "seq2seq":
        start = reference.config.decoder_start_token_id
    # A token that is met often, so that responses end at different places.
    first = generated(case, reference, prompts, 1, steps, stop=case.config["vocab_size"])
    stop = Counter(token for row in first for token in set(row)).most_common(1)[0][0]
    greedy = decode_responses(model, prompts, SamplingConfig(steps, temperature=0.0), [stop], start_token=start)
    beam = beam_search(model, prompts, BeamConfig(4, max_new_tokens=steps), [stop], start_token=start)
    ours = {"greedy": greedy.token_ids, "beam": beam.token_ids}
    return {
        name: sum(a != b for a, b in zip(rows, generated(case, reference, prompts, beams, steps, stop), strict=True))
        for (name, rows), beams in zip(ours.items(), (1, 4), strict=True)
    }


def refusals(directory: Path) -> dict[str, bool]:
    """Whether each way to damage a checkpoint is refused with the damaged thing's name."""
    weights, config_path = directory / "model.safetensors", directory / "config.json"
    tensors, config = load_file(weights), json.loads(config_path.read_text())
    victim = max(name for name in tensors if "0" in name.split("."))
    damaged = {
        "missing tensor": (victim, {k: v for k, v in tensors.items() if k != victim}, config),
        "extra tensor": ("surplus.weight", {**tensors, "surplus.weight": torch.zeros(1)}, config),
        "unknown key": ("attention_chunk_size", tensors, {**config, "attention_chunk_size": 30}),
    }
    results = {}
    for kind, (name, broken_tensors, broken_config) in damaged.items():
        save_file(broken_tensors, weights, metadata={"format": "pt"})
        config_path.write_text(json.dumps(broken_config))
        try:
            load_pretrained(directory, "language")
            results[kind] = False
        except UserError as error:
            results[kind] = name in str(error)
    return results


@torch.no_grad()
def head_difference(case: Case, task: str, labels: int, directory: Path) -> float:
    """Largest |difference| of scores of a checkpoint with a head, padded and in batch form."""
    more = {} if task == "next_sentence" else {"num_labels": labels}
    reference = write_checkpoint(case, directory, HEAD_DOORS[task], **more)
    model = load_pretrained(directory, task)
    rows = documents(case)
    if case.kind == "seq2seq":  # a sequence is read at its end token
        rows = [[*row[:-1], reference.config.eos_token_id] for row in rows]
    separator = case.config.get("sep_token_id")
    if task == "span" and separator is not None:  # Longformer asks for RoBERTa's three
        rows = [_with_separators(row, separator) for row in rows if len(row) > 8]
    ids, mask = padded(rows, "right", filler_of(reference))
    segments = padded(segments_of(rows), "right", 0)[0] if case.token_types else None
    out = outputs_of(case, reference, ids, mask, segments)
    ours = model(ids, mask, **({"token_type_ids": segments} if case.token_types else {}))
    in_batch = model(batch=ragged(case, rows))
    whole, flat = SCORES[task](out, mask.bool())
    field = "next_sentence_logits" if task == "next_sentence" else "logits"
    differences = [getattr(ours, field) - whole, getattr(in_batch, field) - flat]
    if task == "next_sentence":
        differences.append(ours.logits[mask.bool()] - out.prediction_logits[mask.bool()])
    return max(map(_largest, differences))


def _with_separators(row: list[int], separator: int) -> list[int]:
    """A question of a fourth of the row, and its context."""
    cut = len(row) // 4
    return [*row[:cut], separator, separator, *row[cut + 2 : -1], separator]


def _of_documents(out: Any, mask: Tensor) -> tuple[Tensor, Tensor]:
    scores = next(out[key] for key in ("seq_relationship_logits", "sop_logits", "logits") if key in out)
    return scores, scores


def _of_tokens(out: Any, mask: Tensor) -> tuple[Tensor, Tensor]:
    return out.logits * mask[..., None], out.logits[mask]


def _of_spans(out: Any, mask: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.stack([out.start_logits, out.end_logits], dim=-1)
    return scores * mask[..., None], scores[mask]


# transformers' output -> the scores of our padded call and of our batch call
SCORES: dict[str, Callable[[Any, Tensor], tuple[Tensor, Tensor]]] = {
    "next_sentence": _of_documents,
    "sequence": _of_documents,
    "tokens": _of_tokens,
    "span": _of_spans,
}


def _largest(x: Tensor) -> float:
    """Largest |x|; an entry that is no number counts as infinite."""
    return x.abs().nan_to_num(torch.inf).max().item() if x.numel() else 0.0
