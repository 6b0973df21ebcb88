"""Random numbers that depend on (seed, position) and on nothing else.

A counter-based generator in the sense of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), with the
finaliser of splitmix64 (Steele et al., 2014) as its mixing function. There is no state to carry, so a token's number is
the same whatever was in the batch, however the prompt was chunked, and after a preemption or a restart.
"""

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MUL_1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each pair, of 53 random bits. float64[N]."""
    mixed = _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MUL_1
    x = (x ^ (x >> np.uint64(27))) * _MUL_2
    return x ^ (x >> np.uint64(31))
