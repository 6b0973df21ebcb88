"""The oracle: kernels.ops in plain torch."""

from kernels.reference.ops import ReferenceOps

__all__ = ["ReferenceOps"]
