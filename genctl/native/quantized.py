"""Products with weights in 8 and in 4 bits.

Codes and scales are the same on every device: sums have one order, and divisors are tensors, because a GPU multiplies
by the reciprocal of a number.

8 bits: one scale for each output, symmetric; the rows of x are quantised too, each by its own largest number, and the
sums are exact integers (LLM.int8(), Dettmers et al. 2022, arXiv:2208.07339, without its outliers). A row never depends
on its neighbours.

4 bits: one scale and one zero for each 32 numbers of a row of the weight, chosen by least squares.

N rows, I features in, O features out. docs/performance.md has the perplexities of `--quantize`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from genctl.native import pages

GROUP = 32  # numbers of a row that share a scale in 4 bits
EXACT = 1024  # products of two 8-bit codes whose sum float32 holds: 1,024 · 127² < 2²⁴
AT_ONCE = 1 << 20  # numbers quantised at a time: they stay in the processor's cache
UNPACKED = {"cpu": 1 << 18, "cuda": 1 << 24}  # numbers that are float32 at a time, where nothing multiplies with codes
ROUNDS = 2  # least-squares rounds for each group of 4-bit numbers


def int8_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [O, I] -> codes int8 [O, I] from -127 to 127, scales f32 [O]: weight ≈ codes · scale."""
    size, width = weight.shape
    codes = torch.empty(size, width, dtype=torch.int8, device=weight.device)
    scales = torch.empty(size, device=weight.device)
    step, mapped, most = max(1, AT_ONCE // width), pages.mapped_files(), _number(127, weight)
    for begin in range(0, size, step):  # in slices, so that no float32 copy of the whole is made
        rows = weight[begin : begin + step].float()
        scale = rows.abs().amax(1) / most
        scales[begin : begin + step] = scale
        divisor = torch.where(scale == 0, 1, scale)[:, None]
        codes[begin : begin + step] = (rows / divisor).round_().clamp_(-127, 127).to(torch.int8)
        pages.release(weight[begin : begin + step], mapped)
    return codes, scales


class Int8Plain:
    """8-bit weights and rows where nothing is compiled: codes are multiplied as float32 numbers.

    Each product has 14 bits, so that sums of `EXACT` of them are exact in any order, for any number of rows.
    """

    form = "plain, int8"
    is_compiled = False

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [O, I]."""
        self.bias, self.most = bias, _number(127, weight)
        self.codes, scales = int8_codes(weight)
        self.scales = scales / self.most  # which x is scaled by, too

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]."""
        flat = x.reshape(-1, x.shape[-1]).float()
        largest = torch.linalg.vector_norm(flat, torch.inf, -1, keepdim=True)
        rows = (flat * (self.most / largest)).round_().nan_to_num_(0.0, 0.0, 0.0)  # where all are 0, so is the product
        y, step = rows.new_empty(len(rows), len(self.codes)), outputs_at_once(rows)
        for begin in range(0, len(self.codes), step):
            part = slice(begin, begin + step)
            y[:, part] = _integer_sums(rows, self.codes[part]) * self.scales[part]
        y.mul_(largest)
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype).view(*x.shape[:-1], -1) if y.numel() else x.new_empty(*x.shape[:-1], len(self.codes))

    def tensors(self) -> tuple[Tensor, ...]:
        """Codes, scales and bias."""
        held = (self.codes, self.scales)
        return held if self.bias is None else (*held, self.bias)


def outputs_at_once(rows: Tensor) -> int:
    """Outputs whose weights are unpacked at a time, for rows [N, I]."""
    return max(1, UNPACKED[rows.device.type] // rows.shape[1])


def _integer_sums(rows: Tensor, codes: Tensor) -> Tensor:
    """rows f32 [N, I], whole numbers from -127 to 127, codes int8 [O, I] -> exact sums, rounded once to f32 [N, O]."""
    parts = zip(torch.split(rows, EXACT, 1), torch.split(codes, EXACT, 1), strict=True)
    sums = [torch.nn.functional.linear(part, few.float()) for part, few in parts]
    return sums[0] if len(sums) == 1 else torch.stack([part.int() for part in sums]).sum(0).float()


def int4_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [O, I] -> codes int8 [O, I] from 0 to 15, scales and zeros bfloat16 [I / 32, O, 2].

    weight ≈ (code - 8) · scale + zero. The range of a group begins as its least and largest number. Then codes and
    range are improved in turn, each by least squares for the other; the best pair of all turns is kept.
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
        # rounded to what the kernel reads before codes are chosen; 0 where all numbers are equal
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
    """Quantised weights where nothing is compiled: they are unpacked for each product, some outputs at a time.

    With `coded` each 32 numbers of x are rounded to 8 bits, as the compiled products do.
    """

    form: str
    is_compiled = False

    def __init__(
        self, shape: Sequence[int], bias: Tensor | None, device: torch.device | None = None, *, coded: bool
    ) -> None:
        """shape [O, I]."""
        (self.size, self.width), self.bias, self.coded = shape, bias, coded
        self.most = torch.tensor(127.0, device=device)

    def numbers(self, part: slice) -> Tensor:
        """The weights of some outputs: float32 [o, I]."""
        raise NotImplementedError

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]."""
        rows = x.reshape(-1, x.shape[-1]).float()
        if self.coded:
            groups = rows.view(len(rows), -1, GROUP)
            largest = torch.linalg.vector_norm(groups, torch.inf, -1, keepdim=True)
            codes = (groups * (self.most / largest)).round().nan_to_num(0.0, 0.0, 0.0)  # where all are 0
            rows = (codes * (largest / self.most)).flatten(1)
        y, step = rows.new_empty(len(rows), self.size), outputs_at_once(rows)
        for begin in range(0, self.size, step):
            part = slice(begin, begin + step)
            y[:, part] = torch.nn.functional.linear(rows, self.numbers(part))
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.size)


def int4_bytes(size: int, width: int, device: str) -> int:
    """Bytes of a weight [O, I] in 4 bits: of 32 numbers 16 bytes, and a scale and a zero.

    On the CPU 16 outputs lie side by side, on a GPU the codes of two groups.
    """
    groups = width // GROUP
    if device == "cpu":
        return -(-size // 16) * 16 * groups * (GROUP // 2 + 4)
    return size * (-(-groups // 2) * GROUP + 4 * groups)
