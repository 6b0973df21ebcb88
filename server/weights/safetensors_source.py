"""Tensors of a Hugging Face folder: one safetensors file or several shards. No pickle is ever read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kernels.ops import Weight
from server.errors import ModelLoadError

_DTYPES = {"F32", "F16", "BF16", "F64"}


class SafetensorsSource:
    """A WeightSource over the shards of one checkpoint. The library checks each header against its file's size."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises ModelLoadError for a file that can't be read, a tensor in two files, or one that is not of floats."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._shards: dict[str, Any] = {}
        for path in files:
            try:
                shard: Any = safe_open(path, framework="pt", device="cpu")
                for name in shard.keys():  # noqa: SIM118 - a safe_open is not iterable
                    view = shard.get_slice(name)
                    if view.get_dtype() not in _DTYPES:
                        raise ModelLoadError(f"{path}: tensor {name!r} is of type {view.get_dtype()}, not of floats")
                    if name in self._shards:
                        raise ModelLoadError(f"{path}: tensor {name!r} is in another file too")
                    self._shapes[name] = tuple(view.get_shape())
                    self._shards[name] = shard
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"can't read {path}: {error}") from error

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def get(self, name: str) -> Weight:
        tensor: torch.Tensor = self._shards[name].get_tensor(name)
        return tensor

    def close(self) -> None:
        self._shards.clear()
