"""Print how far our models are from transformers', one row per family; exit 1 where one is outside its bound.

Random tiny checkpoints written by transformers (parity_cases/FAMILY.yaml), read by our loader. Columns: largest
difference of logits with left and right padding, of log-probabilities in batch form, of logits decoded with a cache, of
scores of checkpoints with heads; largest relative error of a gradient; largest difference after our export and
transformers' import; prompts of 16 continued alike by greedy and beam search; damaged checkpoints refused by name.
No real weights here. Measures: parity_measures.py.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from parity_measures import (
    PROMPT_LENGTHS,
    export_difference,
    generation_differences,
    gradient_difference,
    head_difference,
    logit_differences,
    refusals,
)
from parity_reference import Case, families, read_cases, write_checkpoint

from alignment.errors import UserError
from alignment.models.huggingface.checkpoint import load_pretrained

BOUND = 1e-4  # largest difference of logits, log-probabilities or scores, fp32; largest relative error of a gradient
SPAN_LABELS = 2


def case_measures(case: Case, directory: Path) -> dict[str, float]:
    """Every number of one checkpoint; `greedy` and `beam` count prompts that differ."""
    reference = write_checkpoint(case, directory)
    model = load_pretrained(directory, "language")
    found: dict[str, float] = logit_differences(case, reference, model)
    found["grad"] = gradient_difference(case, reference, model, directory / "gradients")
    found["export"] = export_difference(case, reference, model, directory / "export")
    if case.kind != "encoder":
        found |= generation_differences(case, reference, model)
    return found


def head_measures(case: Case, directory: Path) -> dict[str, float]:
    """Largest difference of scores over the family's heads, decoders' classifiers also with one label."""
    found: list[float] = []
    for task in case.heads:
        counts = (3, 1) if task == "sequence" and case.kind == "decoder" else (SPAN_LABELS if task == "span" else 3,)
        for labels in counts:
            found.append(head_difference(case, task, labels, directory / f"{task}{labels}"))
    return {"heads": max(found)} if found else {}


def holds(worst: dict[str, float]) -> bool:
    """Whether every number is within its bound: nothing at all for exports and searches."""
    exact = ("export", "greedy", "beam")
    return all(value <= (0.0 if way in exact else BOUND) for way, value in worst.items())


def check_family(family: str) -> bool:
    """Print the family's row; True where it holds."""
    cases, worst, case = read_cases(family), dict[str, float](), None
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number, case in enumerate(cases.values()):
                directory = Path(folder, str(number))
                found = case_measures(case, directory) | head_measures(case, directory)
                worst |= {way: max(worst.get(way, 0.0), value) for way, value in found.items()}
            refused = refusals(Path(folder, "0"))
    except UserError as error:  # a checkpoint that does not open: the other rows still have something to say
        print(f"{family:11} FAILED  {case and case.name}: {str(error).splitlines()[0]}", flush=True)
        return False
    held = holds(worst) and all(refused.values())
    print(f"{family:11} {row(worst)}  cases {len(cases)}  refusals {sum(refused.values())}/{len(refused)}  ", end="")
    print("ok" if held else f"OUTSIDE {BOUND:.0e}", flush=True)
    return held


def row(worst: dict[str, float]) -> str:
    """The numbers of one family; a search shows the prompts it continued alike in its worst case."""
    prompts = len(PROMPT_LENGTHS)
    columns: dict[str, Any] = {
        way: f"{prompts - value:.0f}/{prompts}" if way in ("greedy", "beam") else f"{value:.1e}"
        for way, value in worst.items()
    }
    return "  ".join(f"{way} {text}" for way, text in columns.items())


def main() -> int:
    """Exit code."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=families(), default=families(), metavar="NAME")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    held = [check_family(family) for family in parser.parse_args().family]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
