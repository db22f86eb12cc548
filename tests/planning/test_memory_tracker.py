"""The tracker's bytes against chains of tensors worked out by hand."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from alignment.planning.memory import MemoryTracker

KIB = 1024  # 256 float32 numbers


def test_the_peak_of_a_chain_is_what_is_alive_beside_the_new_tensor():
    with MemoryTracker() as tracker:
        a = torch.zeros(256)  # 1 KiB
        b = torch.cat([a, a])  # 2 KiB: 3 alive
        del a  # 2
        c = b + 1  # 4: the peak
        del b  # 2
        d = c[:10].clone()  # 40 bytes more
    assert tracker.peak == 4 * KIB
    assert tracker.live.total() == 2 * KIB + 40
    assert (len(c), len(d)) == (512, 10)


def test_a_view_is_not_counted_again_and_keeps_the_whole_storage_alive():
    with MemoryTracker() as tracker:
        a = torch.zeros(256)
        view = a[:1]
        del a
        assert tracker.live.total() == KIB
        del view
    assert tracker.live.total() == 0 and tracker.peak == KIB


def test_fake_tensors_are_counted_as_real_ones_and_take_no_memory():
    with FakeTensorMode(), MemoryTracker() as tracker:
        huge = torch.empty(2**40, dtype=torch.bfloat16)  # 2 TiB
        assert tracker.live.total() == 2**41
        del huge
    assert tracker.live.total() == 0


def test_categories_and_shares():
    def category(tensor):
        return "logits" if tensor.shape[-1] == 128 else "activations"

    with MemoryTracker(category) as tracker:
        weight = nn.Parameter(torch.zeros(256))
        tracker.count([weight], "gradients", 0.25)  # 1 KiB, a quarter of it here
        logits = torch.zeros(2, 128)
    assert tracker.live == {"activations": 0, "gradients": KIB // 4, "logits": KIB}
    assert logits.numel() == 256


def test_the_backward_pass_of_a_linear_layer():
    # x [64, 16] 4 KiB, w [16, 16] 1 KiB, y = x w [64, 16] 4 KiB, loss 4 bytes; backward makes the gradient of y, 4 KiB
    # (an expanded view of the loss's gradient until it is needed whole), and that of w, 1 KiB.
    x = torch.ones(64, 16)
    layer = nn.Linear(16, 16, bias=False)
    with MemoryTracker() as tracker:
        tracker.count([x], "inputs")
        tracker.count(layer.parameters(), "weights")
        loss = (layer(x) * 2).sum()
        loss.backward()
        tracker.count([layer.weight.grad], "gradients")
        del loss
    assert tracker.live["gradients"] == KIB == tracker.live["weights"]
    assert tracker.live.total() == tracker.live["inputs"] + 2 * KIB  # nothing else is left
    # At the peak: x, w, their product and its double.
    assert tracker.peak >= 4 * KIB + KIB + 8 * KIB


def test_a_weight_that_is_used_twice_is_added_up_in_place():
    # In the backward pass the gradient of w from the second use is added to that from the first: two of them are alive,
    # and not the sum as a third.
    weight = nn.Parameter(torch.zeros(256, 256))  # 256 KiB
    x = torch.ones(1, 256)
    with MemoryTracker() as tracker:
        tracker.count([weight], "weights")
        ((x @ weight).sum() + (x @ weight).sum()).backward()
    assert 3 * 256 * KIB <= tracker.peak < 3.1 * 256 * KIB
