"""Which models compute a prompt once for all of its responses, and which prompts. Batches are built in data/batches.py."""

from collections.abc import Callable, Sequence
from functools import partial

from alignment.models.layers.layer_contexts import shares_prompts
from alignment.models.layers.rotary import RotarySpec, equal_angles
from alignment.models.native_model import NativeModel
from alignment.models.transformer import TransformerSpec
from alignment.ragged import Sharing

TASKS = ("language", "scalar")  # heads that read single tokens, and so do not see which document a token is of


def supports_shared_prompts(model: object) -> bool:
    """Whether a model takes batches with shared prompts: decoders with a head for tokens or values that run as our classes.

    Encoders do not, because their tokens see what follows; nor do encoder-decoders, whose prompt is another document, nor
    architectures that run as transformers' own class.
    """
    return (
        isinstance(model, NativeModel)
        and model.task in TASKS
        and isinstance(model.spec, TransformerSpec)
        and shares_prompts(model.spec.layers)
    )


def prompt_sharing(models: Sequence[object], *, wanted: bool, note: Callable[[str], None]) -> Sharing:
    """Which groups of documents share their prompt in batches that all of these models read.

    Args:
        models: policy, reference, reward model ...; None among them is skipped.
        wanted: the setting of the run.
        note: is told in one line why prompts are not shared, or not all, where they are wanted.
    """
    present = [model for model in models if model is not None]
    if not wanted:
        return False
    for model in present:
        if not supports_shared_prompts(model):
            note(
                "prompts: computed again for each response to them, for a prompt is shared by decoders that run as classes "
                f"of this library only, and {_name(model)} is none"
            )
            return False
    scaled = sorted({pair for model in present for pair in _scaled_rotaries(model)}, key=str)
    if not scaled:
        return True
    note(
        "prompts: computed once for responses with which they have the same rotary angles; beyond "
        f"{min(rotary.scaling.original_positions for rotary, _ in scaled)} tokens these depend on the document's length"  # type: ignore[union-attr]
    )
    return partial(_share_angles, scaled)


def _name(model: object) -> str:
    return str(getattr(model, "config", {}).get("model_type", type(model).__name__))


def _scaled_rotaries(model: object) -> list[tuple[RotarySpec, int]]:
    """Rotary angles that depend on a document's length, and positions that are taken before its first token."""
    assert isinstance(model, NativeModel)
    found = {getattr(layer.attention, "rotary", None) for layer in model.spec.layers}
    scaled = [rotary for rotary in found if rotary is not None and rotary.by_length]
    # A reference may be the same model with its prefix or soft prompt off.
    return [(rotary, taken) for rotary in scaled for taken in {0, model.virtual_tokens()}]


def _share_angles(rotaries: Sequence[tuple[RotarySpec, int]], lengths: Sequence[int]) -> bool:
    return all(equal_angles(rotary, [taken + length for length in lengths]) for rotary, taken in rotaries)
