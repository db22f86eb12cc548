"""The tracker's bytes against chains of tensors worked out by hand."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from alignment.planning.memory_tracker import MemoryTracker

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
    assert tracker.total == 2 * KIB + 40
    assert (len(c), len(d)) == (512, 10)


def test_a_view_is_not_counted_again_and_keeps_the_whole_storage_alive():
    with MemoryTracker() as tracker:
        a = torch.zeros(256)
        view = a[:1]
        del a
        assert tracker.total == KIB
        del view
    assert tracker.total == 0 and tracker.peak == KIB


def test_fake_tensors_are_counted_as_real_ones_and_take_no_memory():
    with FakeTensorMode(), MemoryTracker() as tracker:
        huge = torch.empty(2**40, dtype=torch.bfloat16)  # 2 TiB
        assert tracker.total == 2**41
        del huge
    assert tracker.total == 0


def test_categories_scales_and_bytes_without_a_tensor():
    def category(tensor):
        return "logits" if tensor.shape[-1] == 128 else "activations"

    with MemoryTracker(category, scale=lambda name: 0.25 if name == "weights" else 1.0) as tracker:
        weight = nn.Parameter(torch.zeros(256))
        tracker.count([weight], "weights")  # 1 KiB, a quarter of it here
        tracker.count_bytes("optimizer", 2 * KIB)
        logits = torch.zeros(2, 128)
    assert tracker.at_peak == {"weights": KIB // 4, "optimizer": 2 * KIB, "logits": KIB}
    assert tracker.peak == sum(tracker.at_peak.values()) == KIB // 4 + 3 * KIB
    assert logits.numel() == 256


def test_the_backward_pass_of_a_linear_layer():
    # x [64, 16] 4 KiB, w [16, 16] 1 KiB, y = x w [64, 16] 4 KiB, loss 4 bytes; backward makes the gradient of y, 4 KiB
    # (an expanded view of the loss's gradient until it is needed whole), and that of w, 1 KiB.
    x = torch.ones(64, 16)
    layer = nn.Linear(16, 16, bias=False)
    with MemoryTracker() as tracker:
        tracker.count([x], "inputs")
        tracker.count(layer.parameters(), "weights")
        tracker.watch_gradients(layer)
        loss = (layer(x) * 2).sum()
        loss.backward()
        del loss
    assert tracker.live["gradients"] == KIB == tracker.live["weights"]
    assert tracker.total == tracker.live["inputs"] + 2 * KIB  # nothing else is left
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


def test_gradients_of_a_linear_layer_that_is_used_twice_are_added_up_in_a_new_tensor():
    # Its weight is transposed for the product, so that each gradient is a view, and autograd adds in place only to what
    # shares its storage with no other tensor. The weight, both gradients and their sum are alive; 256 KiB each.
    layer, x = nn.Linear(256, 256, bias=False), torch.ones(1, 256)
    with MemoryTracker() as tracker:
        tracker.count(layer.parameters(), "weights")
        (layer(x).sum() + layer(x).sum()).backward()
    assert 4 * 256 * KIB <= tracker.peak < 4.1 * 256 * KIB
