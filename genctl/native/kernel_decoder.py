"""Decode steps and prefill with Triton kernels: the passes of `decoder.Decoder` in about five launches a layer.

If the kernels do not support some part of a decoder, `KernelDecoder` raises NotForKernels and torch runs all of it.

N rows, F tokens fed to each, T = N · F, E features of the residual stream, H heads of queries, K heads of keys and
values, D features of a head, C columns of a cache, V vocabulary.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from genctl.native.decoder import Decoder, LayerWeights
from genctl.native.kernel_pass import MOST_TIMES, TOKENS, Columns, KernelLayer, KernelParts, KernelPass, power
from genctl.native.linear import Joined
from genctl.native.mlp import MLP, Activation, RMSNorm, same
from genctl.native.quantized import Product

MOST_TOKENS = 2048  # tokens per pass: longer prompts are read in chunks
MOVED = 8192  # elements, over all rows, that one program moves: they must fit in its registers
SHARED = 99 * 1024  # bytes of shared memory that a program can use on every GPU since 2020
ACTIVATIONS = ("silu", "relu", "gelu", "gelu_tanh", "quick_gelu")
# compute capability -> shared memory, for GPUs on which the kernels were compared with torch; other GPUs use torch
TRIED = {(9, 0): 227 * 1024}


def unusable(device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernels do not run on a CUDA device, whatever the decoder; "" if they do."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernels compute in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if (major, minor) in TRIED else f"the kernels have not run on compute capability {major}.{minor} yet"


class NotForKernels(Exception):
    """A part of a decoder that the kernels do not compute; the message names it."""


class KernelDecoder:
    """Runs the passes of one decoder. `launches` counts the kernels launched by passes."""

    def __init__(self, decoder: Decoder) -> None:
        """Raises NotForKernels."""
        spec, weights = decoder.spec, decoder.weights
        angles = [rotary for rotary in (decoder.rotary, decoder.local_rotary) if rotary is not None]
        for part, wrong in {
            "another norm than RMS": spec.norm != "rms", "sublayers at once": spec.parallel, "experts": spec.experts,
            "an MLP without gate": not spec.gated, "an encoder": spec.encoder, "clipped queries": spec.clip_qkv,
            "linear biases": spec.alibi, "relative positions": spec.relative, "attention sinks": spec.sinks,
            "scaling by layer": spec.scaling_by_layer, "a scaled head": spec.head_scale != 1.0,
            "embeddings of another width": spec.embed_size, "attention to later tokens": not spec.causal,
            "another order of queries, keys and values": spec.qkv not in ("split", "joined"),
            "such norms of queries and keys": spec.qk_norm not in ("", "head"),
            "angles that depend on the length": any(rotary.fixed is None for rotary in angles),
        }.items():  # fmt: skip
            if wrong:
                raise NotForKernels(part)
        from genctl.kernels import cuda, cuda_attention, forms

        self.decoder, self.launches = decoder, 0
        self._compiled: set[tuple[int, ...]] = set()  # `sizes` of passes
        self._table: tuple[list[int], Tensor] | None = None  # addresses of the buffers, on the host and on the device
        capability = torch.cuda.get_device_capability(decoder.device) if decoder.device.type == "cuda" else (0, 0)
        self.parts = KernelParts(
            decoder,
            [self._layer(number, layer) for number, layer in enumerate(weights.layers)],
            _gain(weights.final_norm),
            _product(decoder.output),
            cuda,
            cuda_attention,
            forms,
            TRIED.get(capability, SHARED),
            pdl=capability >= (9, 0),
        )

    def _layer(self, number: int, w: LayerWeights) -> KernelLayer:
        spec, decoder = self.decoder.spec, self.decoder
        if type(w.mlp) is not MLP or w.mlp_norm is None or w.attn_sum_norm is not same or w.mlp_sum_norm is not same:
            raise NotForKernels("norms at other places")
        if not isinstance(w.mlp.activation, Activation) or w.mlp.activation.name not in ACTIVATIONS:
            raise NotForKernels("another activation")
        after = tuple(None if norm is same else _gain(norm) for norm in (w.attn_out_norm, w.mlp_out_norm))
        head_gains = None
        if spec.qk_norm:
            head_gains = torch.stack([_gain(w.q_norm), _gain(w.k_norm)])
        rotary = decoder.rotary if spec.windows[number] is None else decoder.local_rotary
        rotary = rotary if number not in spec.no_rope_layers else None
        assert len(after) == 2
        return KernelLayer(
            _product(w.qkv),
            _product(w.o),
            _product(w.mlp.up),
            _product(w.mlp.down),
            w.mlp.activation.name,
            (_gain(w.attn_norm), _gain(w.mlp_norm)),
            after,
            head_gains,
            None if rotary is None else rotary.fixed,
            1.0 if rotary is None else rotary.rope.attention_factor,
        )

    @torch.no_grad()
    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        columns: Columns,
        buffers: Sequence[tuple[Tensor, Tensor]],
        keep: int | None = None,
    ) -> Tensor:
        """Tokens and positions int64 [N, F] -> logits f32 [N, F, V]; keys and values of each layer [N, K, C, D].

        With `keep`, only the logits of the last `keep` tokens of each row.
        """
        done = KernelPass(self.parts, tokens, positions, columns, buffers, keep)
        if self.decoder.device.type == "cuda":
            self._compile([done])
        done.run()
        self.launches += len(done.launches)
        return self.decoder.scaled(done.logits).view(len(tokens), done.count // len(tokens), self.decoder.spec.vocab)

    def move_rows(self, buffers: Sequence[tuple[Tensor, Tensor]], rows: Tensor, since: int, end: int) -> None:
        """Row i of a cache becomes row `rows[i]` (int64 [N]), in place, in the columns from `since` to `end`.

        One launch for keys and values of all layers, [N, K, C, D] each, of one shape.
        """
        flat = [buffer for pair in buffers for buffer in pair]
        where, like = [buffer.data_ptr() for buffer in flat], flat[0]
        if self._table is None or self._table[0] != where:
            self._table = where, torch.tensor(where, dtype=torch.int64, device=like.device)
        _, heads, columns, size = like.shape
        most = power(len(rows))
        each = max(16, MOVED // most)
        blocks = -(-(end - since) * size // each)
        if blocks > 0:
            self.parts.attention.move_rows[blocks, heads, len(flat)](
                self._table[1], rows, like, len(rows), since, end - since, columns,
                D=size, R=most, N=each,
            )  # fmt: skip

    def tokens_at_once(self, rows: int) -> int:
        """The largest number of tokens per row in one pass."""
        return max(1, MOST_TOKENS // rows)

    @torch.no_grad()
    def compile(self) -> None:
        """Compile the kernels for one token and for many, and run each.

        They are the same for any number of rows and columns. Those for a few tokens are compiled on first use.
        """
        passes = [self.example(tokens) for tokens in (1, MOST_TIMES * TOKENS)]
        self._compile(passes)
        with torch.cuda.device(self.decoder.device):
            for done in passes:
                done.run()
            torch.cuda.synchronize(self.decoder.device)

    def _compile(self, passes: Sequence[KernelPass]) -> None:
        """Compile all kernels of some passes in threads (most of the work is not Python), or load Triton's cache."""
        new = [done for done in passes if done.sizes not in self._compiled]
        self._compiled.update(done.sizes for done in new)
        different = {launch.variant: launch for done in new for launch in done.launches}.values()
        if different:
            with ThreadPoolExecutor(len(different)) as pool:
                list(pool.map(lambda launch: launch.compile(self.decoder.device), different))

    def example(self, tokens: int) -> KernelPass:
        """A pass over this many tokens of one row."""
        spec, device = self.decoder.spec, self.decoder.device
        numbers = torch.zeros(1, tokens, dtype=torch.long, device=device)
        shape = 1, spec.kv_heads, -(-tokens // 64) * 64, spec.head_dim
        cache = torch.zeros(shape, dtype=self.decoder.dtype, device=device)
        start = torch.zeros(1, dtype=torch.int32, device=device)
        columns = dict.fromkeys(spec.windows, (numbers[0, :1], start))
        return KernelPass(self.parts, numbers, numbers, columns, [(cache, cache)] * spec.layers)


def decoder_by_kernels(decoder: Decoder) -> tuple[KernelDecoder | None, str]:
    """A KernelDecoder if the decoder's products were made for the kernels; else None and the reason ("": none to note).

    Without a C compiler, or in an environment without Triton's tools, torch computes the steps.
    """
    if not isinstance(decoder.output, Product) or not decoder.output.by_kernels:
        return None, ""
    try:
        step = KernelDecoder(decoder)
        if decoder.device.type == "cuda":
            step.compile()
    except NotForKernels as part:
        return None, f"torch's operations compute the steps: the kernels do not compute {part}"
    except Exception as error:  # any error of a compiler, a driver or the file system
        reason = (str(error) or type(error).__name__).partition("\n")[0]
        return None, f"torch's operations compute the steps: the kernels cannot be compiled ({reason})"
    return step, ""


def _gain(norm: Any) -> Tensor:
    if type(norm) is not RMSNorm:
        raise NotForKernels("another norm than RMS")
    return norm.weight.float().contiguous()


def _product(product: Any) -> Product:
    if type(product) is Joined:
        product = product.one
    if not isinstance(product, Product):
        raise NotForKernels("biases of some of queries, keys and values alone")
    return product
