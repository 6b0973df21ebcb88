"""kernels.ops.Sampler over native/sampling.cpp: the reference sampler's definitions and random numbers, in one pass."""

import ctypes

import torch


def sample(
    lib: ctypes.CDLL,
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """See kernels.ops.Sampler. The other tensors are contiguous. Raises ValueError, MemoryError."""
    if logits.dtype is not torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"expected float32 rows without gaps, got {logits.dtype}, strides {logits.stride()}")
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.int64)
    failed = lib.pt_sample(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        vocab_size,
        temperature.data_ptr(),
        top_k.data_ptr(),
        top_p.data_ptr(),
        min_p.data_ptr(),
        seeds.data_ptr(),
        positions.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"no memory to sample {rows} rows of {vocab_size} logits")
    return out
