"""Examples as text for human readers: token boundaries, and the tokens that count."""

from itertools import groupby

from alignment.data.tokenize import Example, PairExample, PromptExample
from alignment.data.tokenizers.tokenizer import Tokenizer

SHOWN_TOKENS = 160


def show_example(example: Example | PairExample | PromptExample, tokenizer: Tokenizer) -> str:
    """Tokens between bars, those that count in square brackets; ids and boundaries below."""
    if isinstance(example, PairExample):
        margin = "" if example.margin is None else f", margin {example.margin:g}"
        chosen, rejected = (_show(side, tokenizer) for side in (example.chosen, example.rejected))
        return f"{example.row_id}{margin}\n chosen\n{chosen}\n rejected\n{rejected}"
    if isinstance(example, PromptExample):
        example = Example(example.ids, [False] * len(example.ids), example.row_id)
    return f"{example.row_id}\n{_show(example, tokenizer)}"


def _show(example: Example, tokenizer: Tokenizer) -> str:
    first = max(0, len(example.ids) - SHOWN_TOKENS)  # the end is where the mistakes are
    tokens = [token_text(index, tokenizer) for index in example.ids[first:]]
    spans = [
        ("[" if counts else "") + "|".join(tokens[index] for index in indices) + ("]" if counts else "")
        for counts, indices in groupby(range(len(tokens)), key=lambda index: example.mask[first + index])
    ]
    ids = " ".join(map(str, example.ids[first:]))
    left_out = f"... {first} tokens before ...\n  " if first else ""
    return (
        f"  {left_out}{' '.join(spans)}\n  ids {ids}\n"
        f"  {len(example.ids)} tokens, {sum(example.mask)} count: {boundaries(example.mask)}"
    )


def token_text(index: int, tokenizer: Tokenizer) -> str:
    """One token as text on one line; bytes that are no whole character show as the vocabulary spells them."""
    text = str(tokenizer.decode([index]))
    if "\ufffd" in text or not text:
        text = str(tokenizer.convert_ids_to_tokens(index))
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def boundaries(mask: list[bool]) -> str:
    """Runs of the mask with their first and last index: "context 0-4, counts 5-9"."""
    runs = [(counts, list(indices)) for counts, indices in groupby(range(len(mask)), key=lambda index: mask[index])]
    return ", ".join(f"{'counts' if counts else 'context'} {run[0]}-{run[-1]}" for counts, run in runs)
