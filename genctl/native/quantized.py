"""Products with weights in 8 and in 4 bits.

Codes and scales are the same on every device: sums have one order, and divisors are tensors, because a GPU would
multiply by the reciprocal of a Python number.

8 bits: one symmetric scale for each output; each row of x is quantised too, by its own largest magnitude, and the
sums are exact integers (LLM.int8(), Dettmers et al. 2022, arXiv:2208.07339, without its outliers). A row never depends
on other rows.

4 bits: one scale and one zero for each 32 numbers of a row of the weight, chosen by least squares.

Without compiled products, and on a GPU for decoders that its kernels do not support, torch multiplies: some outputs at
a time are unpacked to float32. `blocks` has the 4-bit products of the CPU.

N rows, I features in, O features out, G = I / 32. docs/performance.md has the perplexities of `--quantize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from genctl.native import pages

GROUP = 32  # numbers of a row that share a scale in 4 bits
EXACT = 1024  # products of two 8-bit codes whose sum is exact in float32: 1,024 · 127² < 2²⁴
AT_ONCE = 1 << 20  # numbers quantised at a time: they stay in the processor's cache
UNPACKED = {"cpu": 1 << 18, "cuda": 1 << 24}  # numbers unpacked to float32 at a time, if codes cannot be multiplied
ROUNDS = 2  # least-squares rounds for each group of 4-bit numbers


def int8_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [O, I] -> codes int8 [O, I] from -127 to 127, scales f32 [O]: weight ≈ codes · scale."""
    size, width = weight.shape
    codes = torch.empty(size, width, dtype=torch.int8, device=weight.device)
    scales = torch.empty(size, device=weight.device)
    step, mapped, most = max(1, AT_ONCE // width), pages.mapped_files(), _number(127, weight)
    for begin in range(0, size, step):  # in slices, to avoid a float32 copy of the whole
        rows = weight[begin : begin + step].float()
        scale = rows.abs().amax(1) / most
        scales[begin : begin + step] = scale
        divisor = torch.where(scale == 0, 1, scale)[:, None]
        codes[begin : begin + step] = (rows / divisor).round_().clamp_(-127, 127).to(torch.int8)
        pages.release(weight[begin : begin + step], mapped)
    return codes, scales


def int4_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [O, I] -> codes int8 [O, I] from 0 to 15, scales and zeros bfloat16 [I / 32, O, 2].

    weight ≈ (code - 8) · scale + zero. The range of a group is at first from its smallest to its largest number. Then
    codes and range are refitted in turn, each given the other, by least squares; the best pair of all rounds is kept.
    """
    size, width = weight.shape
    codes = torch.empty(size, width, dtype=torch.int8, device=weight.device)
    scales = torch.empty(width // GROUP, size, 2, dtype=torch.bfloat16, device=weight.device)
    step = max(1, AT_ONCE // width)
    for begin in range(0, size, step):
        part = slice(begin, begin + step)
        groups = weight[part].float().reshape(-1, GROUP)
        best, scale, zero = _int4_groups(groups)
        codes[part] = best.view(-1, width)
        scales[:, part, 0] = scale.view(-1, width // GROUP).t()
        scales[:, part, 1] = zero.view(-1, width // GROUP).t()
    return codes, scales


def _int4_groups(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """groups float32 [M, 32] -> codes [M, 32], scale and zero bfloat16 [M, 1]."""
    low, high = groups.aminmax(dim=1, keepdim=True)
    scale = (high - low) / _number(15, groups)
    zero, mean = low + scale * 8, _sum(groups) / GROUP
    best: tuple[Tensor, Tensor, Tensor] | None = None
    least = groups.new_full((len(groups), 1), torch.inf)
    for turn in range(ROUNDS + 1):
        # rounded to the kernel's type before codes are chosen; 0 where all numbers are equal
        short, base = scale.to(torch.bfloat16), zero.to(torch.bfloat16)
        wide = torch.where(short == 0, 1, short.float())
        codes = ((groups - base.float()) / wide).round_().clamp_(-8, 7)
        error = _sum((codes * short.float() + base.float() - groups).square_())
        if best is None:
            best, least = (codes, short, base), error
        else:
            better = error < least
            best = (
                torch.where(better, codes, best[0]),
                torch.where(better, short, best[1]),
                torch.where(better, base, best[2]),
            )
            least = torch.minimum(error, least)
        if turn < ROUNDS:
            middle = _sum(codes) / GROUP
            spread = _sum((codes - middle).square())
            scale = _sum((codes - middle) * groups) / spread.clamp(min=1e-30)
            scale = torch.where(spread == 0, 0, scale)
            zero = mean - scale * middle
    assert best is not None
    return best[0] + 8, best[1], best[2]


def _sum(groups: Tensor) -> Tensor:
    """[M, 32] -> [M, 1], always in this order."""
    while groups.shape[1] > 1:
        half = groups.shape[1] // 2
        groups = groups[:, :half] + groups[:, half:]
    return groups


def _number(value: float, beside: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=beside.device)


class Unpacked:
    """A product by torch that unpacks weights to float32, some outputs at a time.

    With `coded`, x is rounded to 8 bits in groups of 32 numbers, as in the compiled products.
    """

    form: str
    is_compiled = False
    kind = ""  # the FORM of the kernels of a GPU (see `kernel_pass`)
    held: tuple[Tensor, ...]  # its weight

    def __init__(
        self, shape: Sequence[int], bias: Tensor | None, device: torch.device | None = None, *, coded: bool
    ) -> None:
        """shape [O, I]."""
        (self.size, self.width), self.bias, self.coded = shape, bias, coded
        self.most = torch.tensor(127.0, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]."""
        rows, factors = self.rounded(x.reshape(-1, x.shape[-1]).float())
        y, step = rows.new_empty(len(rows), self.size), max(1, UNPACKED[rows.device.type] // rows.shape[1])
        for begin in range(0, self.size, step):
            part = slice(begin, begin + step)
            y[:, part] = self.sums(rows, part)
        if factors is not None:
            y.mul_(factors)
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.size)

    def rounded(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows f32 [N, I] as they enter the product, and the factor of each row's sums, [N, 1] or None."""
        if not self.coded:
            return rows, None
        groups = rows.view(len(rows), -1, GROUP)
        largest = torch.linalg.vector_norm(groups, torch.inf, -1, keepdim=True)
        codes = (groups * (self.most / largest)).round().nan_to_num(0.0, 0.0, 0.0)  # where all are 0
        return (codes * (largest / self.most)).flatten(1), None

    def sums(self, rows: Tensor, part: slice) -> Tensor:
        """rows [N, I] times the weights of some outputs: [N, o]."""
        return F.linear(rows, self.numbers(part))

    def numbers(self, part: slice) -> Tensor:
        """The weights of some outputs: float32 [o, I]."""
        raise NotImplementedError

    def tensors(self) -> tuple[Tensor, ...]:
        """Weight and bias."""
        return self.held if self.bias is None else (*self.held, self.bias)


class Int8Product(Unpacked):
    """Weights in 8 bits: codes int8 [O, I], scales f32 [O]. Codes are multiplied as float32 numbers.

    A product of two codes has 14 bits, so sums of `EXACT` of them are exact in any order, for any number of rows.
    """

    kind = "int8"

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, by_kernels: bool | None = None) -> None:
        """weight [O, I]. `by_kernels`: on a GPU, whether its kernels multiply (else torch); None on the CPU."""
        super().__init__(weight.shape, bias, weight.device, coded=True)
        self.weight, scales = int8_codes(weight)
        self.scales = scales / self.most  # codes of x are scaled by 1 / 127, too
        self.held, self.wide_bias = (self.weight, self.scales), _wide(bias)
        self.by_kernels = bool(by_kernels)
        self.form = "plain, int8" if by_kernels is None else f"int8 by {'kernels' if by_kernels else 'torch'}"

    def rounded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Each row scaled by its largest magnitude and rounded to codes; the magnitudes are the factors."""
        largest = torch.linalg.vector_norm(rows, torch.inf, -1, keepdim=True)
        # where all are 0, so is the product
        return (rows * (self.most / largest)).round_().nan_to_num_(0.0, 0.0, 0.0), largest

    def sums(self, rows: Tensor, part: slice) -> Tensor:
        """Integers from -127 to 127; the sums are exact, rounded once to f32, and multiplied by the scales."""
        parts = zip(torch.split(rows, EXACT, 1), torch.split(self.weight[part], EXACT, 1), strict=True)
        sums = [F.linear(x, few.float()) for x, few in parts]
        one = sums[0] if len(sums) == 1 else torch.stack([x.int() for x in sums]).sum(0).float()
        return one * self.scales[part]


class Int4Product(Unpacked):
    """Weights in 4 bits on a GPU, uint8 [O, G / 2, 32]: a byte holds a group's code and, in its high half, the next's.

    scales int32 [O, G]: two bfloat16 numbers, a scale in the low half and a zero in the high half.
    """

    kind = "int4"

    def __init__(self, weight: Tensor, bias: Tensor | None, *, by_kernels: bool) -> None:
        """weight [O, I]; I is a multiple of 32."""
        super().__init__(weight.shape, bias, weight.device, coded=True)
        codes, scales = int4_codes(weight)
        groups = codes.view(torch.uint8).view(len(codes), -1, GROUP)
        if groups.shape[1] % 2:
            groups = torch.cat([groups, torch.zeros_like(groups[:, :1])], 1)
        self.weight = groups[:, ::2] | groups[:, 1::2] << 4
        self.scales = scales.transpose(0, 1).flatten().view(torch.int32).view(len(codes), -1)
        self.held, self.wide_bias = (self.weight, self.scales), _wide(bias)
        self.by_kernels = by_kernels
        self.form = f"int4 by {'kernels' if by_kernels else 'torch'}"

    def numbers(self, part: slice) -> Tensor:
        """float32 [o, I]."""
        bytes_ = self.weight[part]
        codes = torch.stack([bytes_ & 15, bytes_ >> 4], 2).flatten(1, 2)[:, : self.width // GROUP].float()
        scale, zero = self.scales[part].view(torch.bfloat16).float().view(*codes.shape[:2], 2, 1).unbind(2)
        return ((codes - 8) * scale + zero).flatten(1)


class KernelProduct(Unpacked):
    """y = x Wᵀ + b with a weight in the type of x: by a GPU's kernels in a `KernelPass`, by torch when called."""

    kind = "floats"
    by_kernels = True
    scales: Tensor | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [O, I]."""
        super().__init__(weight.shape, bias, weight.device, coded=False)
        self.weight = weight.contiguous()
        self.held, self.wide_bias = (self.weight,), _wide(bias)
        self.form = f"{str(weight.dtype).removeprefix('torch.')} by kernels"

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]."""
        return F.linear(x, self.weight, self.bias)


Product: TypeAlias = KernelProduct | Int8Product | Int4Product


def _wide(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float().contiguous()


def on_gpu(kind: str, weight: Tensor, bias: Tensor | None, *, by_kernels: bool) -> Int8Product | Int4Product:
    """Quantise weight [O, I] to `kind`, "int8" or "int4"; always to int8 if I is no multiple of 32."""
    made = Int4Product if kind == "int4" and weight.shape[1] % GROUP == 0 else Int8Product
    return made(weight, bias, by_kernels=by_kernels)


def int4_bytes(size: int, width: int, device: str) -> int:
    """Bytes of a weight [O, I] in 4 bits: 16 bytes for 32 numbers, and a scale and a zero.

    Sizes are padded: on the CPU to 16 interleaved outputs, on a GPU to pairs of groups.
    """
    groups = width // GROUP
    if device == "cpu":
        return -(-size // 16) * 16 * groups * (GROUP // 2 + 4)
    return size * (-(-groups // 2) * GROUP + 4 * groups)
