"""Frames over the socketpair."""

import socket

import pytest

from server.engine.channel import ChannelClosed, EngineChannel
from server.protocol import AbortRequests, Inspection, Shutdown
from server.protocol.wire import MAX_FRAME_BYTES, FrameBuffer, encode_frame


@pytest.fixture
def pair() -> tuple[EngineChannel, socket.socket]:
    ours, theirs = socket.socketpair()
    return EngineChannel(theirs), ours


@pytest.mark.parametrize("size", [1, 3, 4, 5, 7, 1000])
def test_frames_survive_any_cut(size: int) -> None:
    """Regression: a message lost or doubled because the stream was cut inside its length or its body."""
    stream = encode_frame(AbortRequests(["a"])) + encode_frame(Shutdown()) + encode_frame(AbortRequests(["b" * 300]))
    buffer = FrameBuffer()
    payloads = [p for i in range(0, len(stream), size) for p in buffer.feed(stream[i : i + size])]
    assert b"".join(len(p).to_bytes(4, "little") + p for p in payloads) == stream
    assert len(payloads) == 3


def test_a_stream_out_of_step_is_noticed() -> None:
    """Regression: garbage read as a length that then waits for gigabytes."""
    with pytest.raises(ValueError, match="out of step"):
        list(FrameBuffer().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little")))


def test_commands_that_come_with_the_configuration_are_kept(pair: tuple[EngineChannel, socket.socket]) -> None:
    """Regression: a request sent right behind the configuration that is dropped with its segment."""
    channel, ours = pair
    ours.sendall(b"\x02\0\0\0{}" + encode_frame(Shutdown()))
    assert channel.receive_first(5) == b"{}"
    assert channel.receive(0) == [Shutdown()]


def test_a_reader_that_does_not_read_never_blocks_a_send(pair: tuple[EngineChannel, socket.socket]) -> None:
    """Regression: a step that waits for the API process."""
    channel, ours = pair
    event = Inspection(1, b"x" * 100_000)
    for _ in range(50):
        channel.send(event)
    ours.settimeout(5)
    frames, buffer = [], FrameBuffer()
    while len(frames) < 50:
        frames += buffer.feed(ours.recv(1 << 16))
        channel.receive(0)
    assert len({bytes(f) for f in frames}) == 1


@pytest.mark.parametrize("act", ["receive", "send"])
def test_a_vanished_parent_ends_the_engine(pair: tuple[EngineChannel, socket.socket], act: str) -> None:
    """Regression: an engine that outlives the API process."""
    channel, ours = pair
    ours.close()
    with pytest.raises(ChannelClosed):
        channel.receive(None) if act == "receive" else channel.send(Inspection(1, b""))
