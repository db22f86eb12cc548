"""Knowledge distillation: losses on the teacher's softened distribution and on the direction of its hidden states."""

import torch
import torch.nn.functional as F
from torch import Tensor

from alignment.losses.language import kl_divergence


def distillation_loss(student_logits: Tensor, teacher_logits: Tensor, *, temperature: float) -> Tensor:
    """Distance of the student's softened distribution from the teacher's, one value per prediction.

    cost = T^2 * KL(p_T || q_T) = T^2 * sum_v p_T(v) (log p_T(v) - log q_T(v)),   p_T = softmax(teacher / T)

    T^2 keeps the gradients' size when the temperature changes, so that a hard-label loss can be added. The teacher's
    logits get a gradient only if they carry one: run it under `torch.no_grad`.

    Args:
        student_logits: [M, V], of any floating type.
        teacher_logits: [M, V]; -inf rules a token out.
        temperature: T > 0; 1 leaves the distributions as they are, 2 is usual.

    Returns:
        Unreduced cost in nats, [M], float32 at least; 0 where both agree.

    Raises:
        ValueError: the temperature is not above 0, or the vocabularies differ.

    Source: Hinton et al. 2015, arXiv:1503.02531, section 2; Sanh et al. 2019, arXiv:1910.01108, section 2.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}; 2 is usual")
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(f"student and teacher differ: {tuple(student_logits.shape)}, {tuple(teacher_logits.shape)}")
    return temperature**2 * kl_divergence(teacher_logits / temperature, student_logits / temperature)


def hidden_cosine_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """How far the student's hidden states point away from the teacher's: 1 - cos, one value per token.

    Args:
        student: hidden states, [N, D].
        teacher: [N, D].

    Returns:
        Unreduced cost, [N], float32 at least: 0 in the same direction, 1 at a right angle, 2 in the opposite one.

    Source: Sanh et al. 2019, arXiv:1910.01108, section 2 (L_cos).
    """
    wide = torch.promote_types(student.dtype, torch.float32)
    return 1 - F.cosine_similarity(student.to(wide), teacher.to(wide), dim=-1)
