"""kernels.ops.Ops on Triton: the GPU backend."""

import torch
import torch.nn.functional as F

from kernels.errors import BackendUnavailable
from kernels.layout import KVCache, KVCacheSpec, LayerKV, allocate_token_major
from kernels.metadata import AttentionMetadata
from kernels.ops import DecoderFuser, Linear, QkvLayout, QuantizedWeight, Sampler, Weight
from kernels.triton.activation import gated_activation
from kernels.triton.decode_attention import MAX_QUERY_LEN, REQUESTS_LEAST, decode_attention
from kernels.triton.invariant_attention import invariant_attention
from kernels.triton.kv_write import rope_and_write_kv
from kernels.triton.launch import (
    Target,
    decode_config,
    describe,
    interpreted,
    invariant_config,
    padded,
    prefill_config,
)
from kernels.triton.matmul import matmul
from kernels.triton.prefill_attention import prefill_attention
from kernels.triton.quantized_matmul import can_pack, pack, quantized_matmul
from kernels.triton.rms_norm import rms_norm
from kernels.triton.sampling import sample


class TritonOps:
    """Layout of the cache: key, value [num_blocks, block_size, num_kv_heads, head_dim], one scale a layer if 8-bit.

    batch_invariant: the bits of a token's hidden state, logits and draw depend on its own sequence only; neither on
    the other requests of its steps nor on the chunks in which its keys were computed. Products and attention then take
    one tile for all batches, which is slower: see matmul, quantized_matmul and invariant_attention.
    """

    name = "triton"
    fuse_decoder: DecoderFuser | None = None

    def __init__(
        self, device: str | torch.device = "cuda", *, batch_invariant: bool = False, target: Target | None = None
    ) -> None:
        """device: where packed weights go. target: what to configure kernels for, by default the device.

        Raises BackendUnavailable for a CPU, unless kernels are interpreted.
        """
        self._device = torch.device(device)
        if self._device.type == "cpu" and not interpreted():
            raise BackendUnavailable("backend triton needs a GPU: choose cpu, or TRITON_INTERPRET=1 to debug kernels")
        self._target = target or describe(self._device)
        self._batch_invariant = batch_invariant
        self.sampler: Sampler | None = sample

    def allocate_kv_cache(self, spec: KVCacheSpec, *, num_blocks: int, device: torch.device) -> KVCache:
        """An 8-bit float cache gets one float32 scale a layer for keys and one for values, both 1.

        Raises BackendUnavailable where the device has no e4m3 conversion.
        """
        if spec.dtype == torch.float8_e4m3fn and not self._target.has_fp8:
            raise BackendUnavailable(
                f"an fp8 KV cache needs a GPU with e4m3 conversion (sm_89 or newer), this one is {self._target.arch}: "
                "choose a 16-bit KV cache"
            )
        return allocate_token_major(spec, num_blocks=num_blocks, device=device)

    def pack_linear(
        self,
        weights: list[Weight],
        bias: torch.Tensor | None,
        *,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> Linear:
        """Q4_0, Q4_1 and Q8_0 stay quantised. A dense product is the vendor library's business, unless it must be
        batch-invariant; where the library has no form with another out_dtype (all but CUDA's), the result is rounded to
        dtype first.
        """
        quantized = [part for part in weights if isinstance(part, QuantizedWeight)]
        if len(quantized) == len(weights) and can_pack(quantized):
            packed = pack(quantized, bias, self._device)
            return lambda x: quantized_matmul(
                x, packed, out_dtype=out_dtype or dtype, batch_invariant=self._batch_invariant
            )
        weight = torch.cat([self._dense(part, dtype) for part in weights])
        bias = None if bias is None else bias.to(self._device, dtype)
        if self._batch_invariant:
            return lambda x: matmul(x, weight, bias, target=self._target, out_dtype=out_dtype or dtype)
        if out_dtype in (None, dtype):
            return lambda x: F.linear(x, weight, bias)
        if self._device.type == "cuda" and torch.version.hip is None and bias is None:
            return lambda x: torch.mm(x, weight.t(), out_dtype=out_dtype)
        return lambda x: F.linear(x, weight, bias).to(out_dtype)

    def pack_embedding(self, weight: Weight, *, dtype: torch.dtype) -> Linear:
        table = self._dense(weight, dtype)
        return lambda ids: F.embedding(ids, table)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm(x, weight, eps, residual=residual), residual

    def rope_and_write_kv(
        self,
        qkv: torch.Tensor,
        layout: QkvLayout,
        cos_sin: torch.Tensor,
        layer: LayerKV,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        return rope_and_write_kv(qkv, layout, cos_sin, layer, meta)

    def attention(
        self,
        q: torch.Tensor,
        layer: LayerKV,
        meta: AttentionMetadata,
        *,
        scale: float,
        num_kv_heads: int,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> torch.Tensor:
        """Requests with one new token go to the split-KV kernel, also in a mixed batch; prompts to the prefill kernel.

        A small batch of up to MAX_QUERY_LEN tokens each is decode as a whole; not a large one, so that few variants
        need compiling. In the batch-invariant form one kernel has them all.
        """
        head_dim = q.shape[2]
        out = torch.empty_like(q, memory_format=torch.contiguous_format).flatten(1)
        if self._batch_invariant:
            invariant_attention(
                q, layer, meta, out,
                scale=scale, config=invariant_config(self._target, head_dim), window=window, soft_cap=soft_cap,
            )  # fmt: skip
            return out
        max_query = 1
        if meta.max_query_len <= MAX_QUERY_LEN and meta.num_requests <= REQUESTS_LEAST:
            max_query = padded(meta.max_query_len)
        if meta.max_query_len <= max_query or meta.num_requests > 1:
            decode_attention(
                q, layer, meta, out,
                scale=scale, config=decode_config(self._target, head_dim), num_sms=self._target.num_sms,
                window=window, soft_cap=soft_cap, max_query=max_query,
            )  # fmt: skip
        if meta.max_query_len > max_query:
            prefill_attention(
                q, layer, meta, out,
                scale=scale, config=prefill_config(self._target, head_dim),
                window=window, soft_cap=soft_cap, min_query=max_query + 1,
            )  # fmt: skip
        return out

    def gated_activation(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        return gated_activation(gate_up, kind)

    def _dense(self, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
        matrix = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
        return matrix.to(self._device, dtype)
