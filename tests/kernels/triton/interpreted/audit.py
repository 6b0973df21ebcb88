"""Watches every load and store of interpreted kernels, lane by lane, before it happens.

Each active lane is attributed to one of the launch's tensor arguments by its address; a lane that belongs to none is an
error at once (the access itself might crash the process). What the kernels read, what they wrote and who wrote it is
kept for the test to judge.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter


class AuditError(AssertionError):
    """A kernel touched memory that it must not."""


@dataclass(slots=True)
class Traffic:
    """One launch's accesses by argument name. reads, writes: byte offsets from the argument's first element."""

    kernel: str
    reads: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    writes: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))

    def read(self, argument: str) -> np.ndarray:
        """Every active lane's offset, in the order of the loads, repeats included."""
        return np.concatenate(self.reads[argument]) if argument in self.reads else np.zeros(0, dtype=np.int64)


@contextmanager
def audited() -> Iterator[list[Traffic]]:
    """Launches within append their traffic. Raises AuditError for a lane outside every argument, and for two programs
    that write one address in one launch."""
    launches: list[Traffic] = []
    builder = interpreter.InterpreterBuilder
    load, store, call = builder.create_masked_load, builder.create_masked_store, interpreter.GridExecutor.__call__
    extents: list[tuple[str, int, int]] = []
    writers: dict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)

    def attribute(pointers: Any, mask: Any, log: dict[str, list[np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(np.int64)
        for name, start, end in extents:
            inside = (addresses >= start) & (addresses + size <= end)
            if inside.any():
                log[name].append(addresses[inside] - start)
                yield name, addresses[inside] - start
                addresses = addresses[~inside]
        if len(addresses):
            raise AuditError(f"{launches[-1].kernel}: {len(addresses)} lanes outside every argument")

    def watched_load(self: Any, pointers: Any, mask: Any, *args: Any) -> Any:
        for _ in attribute(pointers, mask, launches[-1].reads):
            pass
        return load(self, pointers, mask, *args)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        program = tuple(np.asarray(i).item() for i in self.grid_idx)
        for name, offsets in attribute(pointers, mask, launches[-1].writes):
            for offset in offsets.tolist():
                other = writers[name].setdefault(offset, program)
                if other != program:
                    raise AuditError(f"{launches[-1].kernel}: programs {other} and {program} write {name} + {offset}")
        return store(self, pointers, value, mask, *args)

    def watched_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(Traffic(self.fn.__name__))
        writers.clear()
        named = dict(zip(self.arg_names, args, strict=False)) | kwargs
        extents[:] = [
            (name, value.data_ptr(), value.data_ptr() + span(value))
            for name, value in named.items()
            if isinstance(value, torch.Tensor)
        ]
        return call(self, *args, **kwargs)

    with (
        mock.patch.object(builder, "create_masked_load", watched_load),
        mock.patch.object(builder, "create_masked_store", watched_store),
        mock.patch.object(interpreter.GridExecutor, "__call__", watched_call),
    ):
        yield launches


def span(tensor: torch.Tensor) -> int:
    """Bytes from a view's first element to its last, both included."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize
