"""How much memory a load took, as the system sees it: what backends repack can't be read off the checkpoint."""

from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def allocated(device: torch.device) -> int | None:
    """Bytes that this process holds on the device: on a CPU its private memory. None where nobody tells."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        return None
    return None
