"""A prompt computed once for all of its responses: the models and the prompts for which that changes no result.

Batches are built in data/batches.py.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from alignment.models.layers.layer_contexts import shares_prompts
from alignment.models.layers.rotary import DynamicScaling, LongScaling, RotarySpec, equal_angles
from alignment.models.native_model import NativeModel
from alignment.models.transformer import TransformerSpec
from alignment.ragged import Sharing

TASKS = ("language", "scalar")  # heads that read single tokens, so that a token may belong to several documents


def supports_shared_prompts(model: object) -> bool:
    """True for models that take batches with shared prompts: our decoders with a head for tokens or values.

    Not for encoders, because their tokens see what follows; nor for encoder-decoders, whose prompt is another document,
    nor architectures that run as transformers' own class.
    """
    return (
        isinstance(model, NativeModel)
        and model.task in TASKS
        and isinstance(model.spec, TransformerSpec)
        and shares_prompts(model.spec.layers)
    )


def prompt_sharing(models: Sequence[object], *, wanted: bool, note: Callable[[str], None]) -> Sharing:
    """The groups of documents that share their prompt in batches that all of these models read; see `Sharing`.

    Args:
        models: policy, reference, reward model ...; None among them is skipped.
        wanted: the setting of the run.
        note: called with one line that says why prompts are not shared, or not all, where they are wanted.
    """
    if not wanted:
        return False
    scaled = set()  # rotary angles that depend on a document's length, and positions taken before its first token
    for model in models:
        if model is None:
            continue
        if not supports_shared_prompts(model):
            name = getattr(model, "config", {}).get("model_type", type(model).__name__)
            note(
                "prompts: computed again for each response to them, for a prompt is shared by decoders that run as "
                f"classes of this library only, and {name} is none"
            )
            return False
        assert isinstance(model, NativeModel)
        for rotary in {getattr(layer.attention, "rotary", None) for layer in model.spec.layers}:
            # A reference may be the same model with its prefix off.
            if rotary is not None and isinstance(rotary.scaling, DynamicScaling | LongScaling):
                scaled |= {(rotary, 0), (rotary, model.virtual_tokens())}
    if not scaled:
        return True
    note(
        "prompts: computed once for responses with which they have the same rotary angles; beyond "
        f"{min(rotary.scaling.original_positions for rotary, _ in scaled)} tokens these depend on the document's length"
    )
    return partial(_share_angles, scaled)


def _share_angles(scaled: Iterable[tuple[RotarySpec, int]], lengths: Sequence[int]) -> bool:
    return all(equal_angles(rotary, [taken + length for length in lengths]) for rotary, taken in scaled)
