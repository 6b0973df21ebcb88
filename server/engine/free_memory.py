"""Memory that was freed and that the C library keeps for the next allocation."""

import ctypes


def give_back_free_memory() -> None:
    """Returns it to the system, holes in the middle of the heap included. Does nothing where the C library can't.

    A step's logits and activations are megabytes that come and go; among blocks that stay, their places add up.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
