"""Names for the content of full blocks.

A block's keys and values depend on its tokens and on every token before them, so its name chains:

    hash[0] = sha256(sha256(salt) + tokens[0 : block_size])
    hash[i] = sha256(hash[i - 1]  + tokens[i * block_size : (i + 1) * block_size])

Equal hashes are taken for equal content without comparing tokens, so the hash has to be one for which nobody can
construct a collision: with a weaker one, a client could craft a prompt that reads another client's cache. The salt
keeps tenants apart: it enters the first hash, and through the chain all others.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256

BlockHash = bytes
"""32 bytes."""

_BYTES_PER_TOKEN = 4


def extend_hashes(hashes: list[BlockHash], token_ids: Sequence[int], *, block_size: int, salt: str = "") -> None:
    """Appends to `hashes` those of the full blocks of `token_ids` that it lacks.

    hashes: of the first len(hashes) blocks of the same tokens under the same salt. token_ids: 0 <= id < 2**31; a
    trailing partial block has no hash. Costs the new blocks only.
    """
    first = len(hashes)
    end = len(token_ids) // block_size
    if first >= end:
        return
    parent = hashes[-1] if hashes else sha256(salt.encode()).digest()
    raw = array("i", token_ids[first * block_size : end * block_size]).tobytes()
    step = block_size * _BYTES_PER_TOKEN
    for offset in range(0, len(raw), step):
        parent = sha256(parent + raw[offset : offset + step]).digest()
        hashes.append(parent)
