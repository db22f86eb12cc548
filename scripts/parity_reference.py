"""transformers' side of the parity script: random tiny checkpoints, and its answers on given documents."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

FOLDER = Path(__file__).resolve().parent / "parity_cases"
DOORS = {"decoder": "AutoModelForCausalLM", "encoder": "AutoModelForMaskedLM", "seq2seq": "AutoModelForSeq2SeqLM"}
HEAD_DOORS = {
    "next_sentence": "AutoModelForPreTraining",
    "sequence": "AutoModelForSequenceClassification",
    "tokens": "AutoModelForTokenClassification",
    "span": "AutoModelForQuestionAnswering",
}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
NOISE = 0.15  # as drawn, logits are too near zero to show an error, and norms and biases are 1 and 0
FIRST_ID = 5  # below are padding and ends, which some classes treat apart


@dataclass(frozen=True)
class Case:
    """One configuration of one family; read from parity_cases/FAMILY.yaml.

    Attributes:
        family, name: the file's, and the variant's in it.
        model_type: transformers' name.
        kind: decoder, encoder or seq2seq.
        config: the base of the family with the variant's changes.
        lengths: of the documents to test, the longest first.
        heads: tasks whose checkpoints are to open.
        token_types: whether sentence A and B are told apart.
        own_head: give the checkpoint a head that is not its embedding, whatever the config says of it.
        rows_alone: transformers sees these rows one by one, without padding: left-padded ones, or both.
    """

    family: str
    name: str
    model_type: str
    kind: str
    config: dict[str, Any]
    lengths: tuple[int, ...]
    heads: tuple[str, ...] = ()
    token_types: bool = False
    own_head: bool = False
    rows_alone: str = ""


def families() -> list[str]:
    """Names of all rows."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_cases(family: str) -> dict[str, Case]:
    """The cases of one row, by name."""
    file = yaml.safe_load((FOLDER / f"{family}.yaml").read_text(encoding="utf-8"))
    longest = file.get("longest", 256)
    usual = (longest, longest * 25 // 32, 31, 1)
    return {
        name: Case(
            family, name, file["model_type"], file["kind"],
            {**IDS, **file["config"], **changes},
            tuple(file.get("lengths", {}).get(name, usual)),
            tuple(file.get("heads", {}).get(name, ())),
            file.get("token_types", False),
            name in file.get("own_head", ()),
            file.get("rows_alone", ""),
        )
        for name, changes in file["variants"].items()
    }  # fmt: skip


def write_checkpoint(case: Case, directory: Path, door: str = "", **more: Any) -> Any:
    """A random transformers model, saved by transformers; returns it in eval mode.

    Args:
        door: name of the Auto class; "": the language model of the case's kind.
        more: further config keys.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(case.model_type, **case.config, **more)
    model = getattr(transformers, door or DOORS[case.kind]).from_config(config).eval()
    if case.own_head and not door:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    saved = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for tensor in {id(tensor): tensor for tensor in saved.values() if tensor.is_floating_point()}.values():
            tensor += NOISE * torch.randn_like(tensor)
    model.save_pretrained(directory)
    return model


def documents(case: Case, lengths: Sequence[int] = (), seed: int = 1) -> list[list[int]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = case.config["vocab_size"]
    return [
        torch.randint(FIRST_ID, vocabulary, (length,), generator=generator).tolist()
        for length in lengths or case.lengths
    ]


def targets_of(case: Case, reference: Any) -> list[list[int]]:
    """What decoders write, the other way round in length: short sources, long targets."""
    start = reference.config.decoder_start_token_id
    return [[start, *row[1:]] for row in documents(case, case.lengths[::-1], seed=2)]


def segments_of(rows: list[list[int]]) -> list[list[int]]:
    """The second half of each document as sentence B."""
    return [[int(i >= len(row) // 2) for i in range(len(row))] for row in rows]


def padded(rows: list[list[int]], side: str, filler: int) -> tuple[Tensor, Tensor]:
    """Rows and their mask [B, T], padding on `side`."""
    width = max(map(len, rows))
    idle = [[filler] * (width - len(row)) for row in rows]
    ids = [gap + row if side == "left" else row + gap for row, gap in zip(rows, idle, strict=True)]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask if side == "left" else [row[::-1] for row in mask])


def filler_of(reference: Any) -> int:
    """What stands at padding: RoBERTa looks for it."""
    pad = reference.config.pad_token_id
    return 7 if pad is None else pad


def call(reference: Any, ids: Tensor, mask: Tensor, segments: Tensor | None = None, **more: Any) -> Any:
    """transformers' forward, told the positions where it would not derive them from the mask."""
    if "position_ids" in inspect.signature(reference.forward).parameters:
        first = filler_of(reference) + 1 if reference.config.model_type in ("roberta", "longformer") else 0
        more["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0) + first
    if segments is not None:
        more["token_type_ids"] = segments
    if reference.config.model_type == "big_bird":  # a short document leaves it without its sparse attention
        reference.base_model.set_attention_type(reference.config.attention_type)
    return reference(input_ids=ids, attention_mask=mask, **more)


def outputs_of(case: Case, reference: Any, ids: Tensor, mask: Tensor, segments: Tensor | None) -> Any:
    """transformers' output on rows padded on the right, row by row where it has to be."""
    if case.rows_alone != "both":
        return call(reference, ids, mask, segments)
    outputs = []
    for row, size in enumerate(mask.sum(1).tolist()):
        one = [x if x is None else x[row : row + 1, :size] for x in (ids, mask, segments)]
        outputs.append(call(reference, *one))
    joined = {key: pad_sequence([output[key][0] for output in outputs], batch_first=True) for key in outputs[0]}
    return type(outputs[0])(**joined)


def logits_of(
    case: Case, reference: Any, side: str, rows: list[list[int]], targets: list[list[int]] | None = None
) -> Tensor:
    """transformers' logits of a batch padded on `side`, at real tokens, row by row, [N, V]."""
    if case.rows_alone in (side, "both") and len(rows) > 1:
        pairs = zip(rows, targets or [None] * len(rows), strict=True)
        return torch.cat([logits_of(case, reference, side, [row], target and [target]) for row, target in pairs])
    filler = filler_of(reference)
    ids, mask = padded(rows, side, filler)
    segments = padded(segments_of(rows), side, 0)[0] if case.token_types else None
    if targets is None:
        return call(reference, ids, mask, segments).logits[mask.bool()]
    target_ids, target_mask = padded(targets, side, filler)
    more = {"decoder_input_ids": target_ids, "decoder_attention_mask": target_mask}
    return reference(input_ids=ids, attention_mask=mask, **more).logits[target_mask.bool()]


def generated(
    case: Case, reference: Any, prompts: list[list[int]], beams: int, steps: int, stop: int
) -> list[list[int]]:
    """New tokens of each prompt by transformers' own search, cut after the stop token."""
    ids, mask = padded(prompts, "right" if case.kind == "seq2seq" else "left", filler_of(reference))
    whole = reference.generate(
        input_ids=ids, attention_mask=mask, num_beams=beams, do_sample=False, max_new_tokens=steps, eos_token_id=stop,
        pad_token_id=filler_of(reference), forced_eos_token_id=None, length_penalty=1.0, early_stopping=False,
    )  # fmt: skip
    begin = 1 if case.kind == "seq2seq" else ids.shape[1]
    rows = whole[:, begin:].tolist()
    return [row[: row.index(stop) + 1] if stop in row else row for row in rows]
