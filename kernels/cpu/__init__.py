"""The CPU backend.

KV layout of CpuOps: key, value [num_blocks, num_kv_heads, block_size, head_dim], so that one block of one head is one
contiguous run. Attention reads a request by copying whole runs (index_select), which lands them as [head, token, dim]
without a transpose, and runs torch's fused attention on the copy, a request's query heads of one group side by side:
keys and values are never expanded to the number of query heads.
"""

from kernels.cpu.ops import CpuOps

__all__ = ["CpuOps"]
