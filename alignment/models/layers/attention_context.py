"""What one attention layer receives with its input: which tokens it attends to, and how. Made in layer_contexts.py."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from alignment.models.layers.padded_layout import PaddedLayout
from alignment.models.layers.rotary import Rotation

# (queries [N, H, K], keys [N, KV, K], values [N, KV, K], dropout) -> [N, H, K]
AttentionFn = Callable[[Tensor, Tensor, Tensor, float], Tensor]
# (queries [N, H, K], states of the encoder -> its keys and values, dropout) -> [N, H, K]
CrossAttentionFn = Callable[[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]], float], Tensor]


@dataclass(frozen=True)
class AttentionContext:
    """What a layer needs to know of the batch beside its input.

    Attributes:
        attend: attention among the batch's own tokens.
        rotation: angles of the tokens' positions, where the layer rotates queries and keys.
        cross_attend: attention on an encoder's states.
        layout: how documents lie in rectangles, for layers that do more than `attend` (DeBERTa).
        relative: vectors of relative positions, for the same layers, [2 * S, D].
        select: keeps the tokens whose output is needed, [N, ...] -> [M, ...]; None: all. In a trunk's last layer only the
            keys and values of the others matter.
    """

    attend: AttentionFn
    rotation: Rotation | None = None
    cross_attend: CrossAttentionFn | None = None
    layout: PaddedLayout | None = None
    relative: Tensor | None = None
    select: Callable[[Tensor], Tensor] | None = None

    def needed(self, x: Tensor) -> Tensor:
        """The tokens of x [N, ...] whose output is needed."""
        return x if self.select is None else self.select(x)

    def outside_graphs(self) -> "AttentionContext":
        """The same context, its attention left out of the graphs of torch.compile."""
        from alignment.models.layers.outside_graphs import OutsideGraphs  # loads the compiler

        cross_attend = None if self.cross_attend is None else OutsideGraphs(self.cross_attend)
        return replace(self, attend=OutsideGraphs(self.attend), cross_attend=cross_attend)
