"""Products of float32 matrices by oneDNN on AMD's processors from Zen 5 on, for which MKL has no AVX-512 kernels.

PyTorch multiplies float32 matrices on a CPU by MKL. On processors of other makers than Intel, MKL takes its AVX2 kernels
where oneDNN, which is a part of PyTorch too, takes AVX-512: twice as fast on a Zen 5 EPYC. Zen 4 computes the 512 bits in
two halves; there oneDNN's products are 10 % faster and whole updates 4 to 7 % slower (scripts/bench_products.py).
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch._C import DispatchKeySet
from torch.library import Library, get_kernel

from alignment.errors import UserError

VARIABLE = "ALIGNMENT_MATRIX_PRODUCTS"  # "mkl" or "onednn" decides instead of the processor
SMALLEST = 2**21  # multiplications of a product that is worth oneDNN's longer call
IMAGES = 16  # in so many parts a convolution reads the tokens; with fewer, PyTorch takes a slower one where it has one thread
FEWEST_TOKENS = 768  # of a weight's gradient that is worth a convolution
ZEN_5 = 26  # AMD's number of the first family that computes 512 bits at once

_libraries: list[Library] = []  # a kernel is registered as long as its library lives; empty: PyTorch's own


def choose_products() -> None:
    """Let oneDNN multiply float32 matrices of this process from now on, where it is faster.

    This replaces the CPU kernels of `aten::mm` and `aten::addmm`, which linear layers call in their forward and backward
    passes, ours and those of other libraries. Small products, numbers of rows that hardly come twice (see `spare_rows`),
    other types and other devices are multiplied as before.
    Which library multiplies depends on the processor and the environment variable alone, so that a run on one machine
    repeats bit for bit; between the two, sums are rounded in another order.

    Raises:
        UserError: the variable names another library, or oneDNN where this PyTorch has none.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in ("", "mkl", "onednn"):
        raise UserError(f"{VARIABLE} is {chosen!r}; it may be 'mkl' or 'onednn', and unset chooses by the processor")
    if chosen == "onednn" and not has_linear():
        raise UserError(f"{VARIABLE} is 'onednn', and this PyTorch has no linear layer of oneDNN; unset it")
    if not _libraries and has_linear() and (chosen == "onednn" or (not chosen and onednn_is_faster())):
        _libraries.append(_registered())


def products_by_onednn() -> bool:
    """Whether oneDNN multiplies large float32 matrices on the CPU in this process."""
    return bool(_libraries)


@contextmanager
def products_by_mkl() -> Iterator[None]:
    """While open, PyTorch's own kernels multiply: for comparisons."""
    replaced = bool(_libraries)
    _libraries.clear()
    try:
        yield
    finally:
        if replaced:
            _libraries.append(_registered())


def spare_rows(rows: int) -> int:
    """Rows of zeros to add to so many, at most a sixteenth or 15, so that few different numbers of rows come about."""
    return -rows % max(16, 1 << max(0, rows.bit_length() - 5))


def has_linear() -> bool:
    """Whether this PyTorch has the operation of oneDNN that is used here."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_is_faster(processor: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether all processors are AMD's with AVX-512 of full width; False where the system does not say.

    Args:
        processor: Linux's file, with lines `vendor_id : NAME` and `cpu family : NUMBER` for each processor.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkl.is_available():
        return False
    try:
        fields = [line.partition(":") for line in processor.read_text().splitlines()]
    except OSError:
        return False
    vendors = {value.strip() for name, _, value in fields if name.strip() == "vendor_id"}
    families = {value.strip() for name, _, value in fields if name.strip() == "cpu family"}
    wide = bool(families) and all(family.isdigit() and int(family) >= ZEN_5 for family in families)
    return wide and vendors == {"AuthenticAMD"}


def _registered() -> Library:
    """The kernels that multiply by oneDNN, in force as long as the library lives."""
    library = Library("aten", "IMPL")
    kernels = {"mm": _matrix_product(_own_kernel("mm")), "addmm": _with_bias(_own_kernel("addmm"))}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)
    return library


def _own_kernel(name: str) -> Callable[..., Tensor]:
    """PyTorch's own kernel, called with the dispatch keys and the operation's arguments."""
    return get_kernel(f"aten::{name}", "CPU").call_boxed


def _matrix_product(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    linear = torch.ops.mkldnn._linear_pointwise.default

    def mm(keys: DispatchKeySet, a: Tensor, b: Tensor) -> Tensor:
        if not _for_onednn(a, b):
            return own(keys, a, b)
        if _is_weight_gradient(a, b):
            return _weight_gradient(a.t(), b)
        return linear(a, b.t(), None, "none", [], "")

    return mm


def _with_bias(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    linear = torch.ops.mkldnn._linear_pointwise.default

    def addmm(keys: DispatchKeySet, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if bias.dim() == 1 and beta == 1 and alpha == 1 and bias.dtype == a.dtype and _for_onednn(a, b):
            return linear(a, b.t(), bias, "none", [], "")
        return own(keys, bias, a, b, beta=beta, alpha=alpha)

    return addmm


def _for_onednn(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN is to multiply a [M, K] and b [K, N].

    It makes a kernel for each shape that it meets for the first time and keeps it, which takes a millisecond and leaves
    holes in memory that larger tensors do not fit. So the number of tokens must be one that comes often: K where `a` is
    transposed, as in the gradient of a weight, else M.
    """
    rows, inner = a.shape
    if rows * inner * b.shape[1] < SMALLEST or a.dtype != torch.float32 or b.dtype != torch.float32:
        return False
    if 1 not in a.stride() or 1 not in b.stride() or inner != b.shape[0] or a.device != b.device:
        return False  # rows and columns with gaps, or what the operation refuses in its own words
    return spare_rows(rows if a.stride(1) == 1 else inner) == 0


def _is_weight_gradient(a: Tensor, b: Tensor) -> bool:
    """Whether a [M, K] is a transposed matrix and b [K, N] none, over so many tokens K that `_weight_gradient` is quicker."""
    transposed = a.t().is_contiguous() and b.is_contiguous()
    return transposed and a.shape[1] >= max(FEWEST_TOKENS, a.shape[0], b.shape[1])


def _weight_gradient(to_output: Tensor, inputs: Tensor) -> Tensor:
    """to_output.T @ inputs, [M, N], as the gradient of a convolution with a kernel of one pixel.

    The linear layer of oneDNN copies a transposed matrix on one thread first; the convolution reads both where they are.

    Args:
        to_output: gradient of a linear layer's output, [K, M], contiguous; K is a multiple of `IMAGES`.
        inputs: what the layer read, [K, N], contiguous.
    """
    images = [x.view(IMAGES, -1, 1, x.shape[1]).permute(0, 3, 1, 2) for x in (to_output, inputs)]  # channels last
    shape = (to_output.shape[1], inputs.shape[1], 1, 1)
    weight = torch.empty(shape, device=inputs.device, memory_format=torch.channels_last)
    gradients = torch.ops.aten.convolution_backward.default(
        images[0], images[1], weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]
    )
    return gradients[1].view(shape[:2])
