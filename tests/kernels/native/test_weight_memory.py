"""Where packed weights lie."""

import gc

import pytest

from kernels.cpu.weight_memory import ALIGNMENT, REGION, WeightMemory


def test_pieces_are_aligned_and_their_own() -> None:
    """Guards neighbors: one layer's packing must not write into another's weights, at the end of a region either."""
    memory = WeightMemory()
    sizes = [1, 64, 65, REGION - 200, REGION, REGION + 1, 3]
    pieces = [memory.take(size) for size in sizes]
    for value, piece in enumerate(pieces):
        piece.fill_(value)
    for value, (size, piece) in enumerate(zip(sizes, pieces, strict=True)):
        assert len(piece) == size
        assert piece.data_ptr() % ALIGNMENT == 0
        assert (piece == value).all()


def test_a_piece_outlives_what_handed_it_out() -> None:
    """Guards against weights that go away with the object that packed them."""
    piece = WeightMemory().take(100)
    gc.collect()
    assert piece.fill_(7).sum() == 700


def test_what_the_system_refuses_is_a_memory_error() -> None:
    """Guards the message: a failed mapping is an OSError, which would read as a broken file."""
    with pytest.raises(MemoryError, match="weights"):
        WeightMemory().take(1 << 62)
