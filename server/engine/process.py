"""The engine process: `python -m server.engine.process FD`, where FD is the inherited end of a socketpair.

The first frame on it is the EngineConfig as JSON. The process lives as long as the stream: when the API process dies,
however it dies, the engine sees the end of file, and on Linux the kernel kills it besides, so that not even a stopped
or hung engine is left behind.
"""

import ctypes
import logging
import signal
import socket
import sys

import msgspec

from server.config import EngineConfig
from server.engine.channel import ChannelClosed, EngineChannel
from server.engine.loop import EngineLoop
from server.errors import StartupError
from server.metrics.logging import configure_logging
from server.protocol import Loading, StartupFailed

_PR_SET_PDEATHSIG = 1
_CONFIG_TIMEOUT_S = 30.0
_EXIT_FAILED = 1

logger = logging.getLogger("pageturner.engine")


def serve(channel: EngineChannel, config: EngineConfig) -> None:
    """Loads the model, says Ready and runs the loop until the API process ends it. Raises whatever a step raises.

    Exits where loading raises what it should not: the API process decides whether to try again.
    """
    channel.send(Loading("importing", 0.0))
    from server.engine.assemble import assemble  # torch takes a second to import: say so first

    def report(phase: str, fraction: float) -> None:
        channel.send(Loading(phase, fraction))

    try:
        core, ready = assemble(config, report)
    except StartupError as error:
        channel.send(StartupFailed(str(error)))
        return
    except ChannelClosed:
        raise
    except Exception:
        logger.exception("the engine failed while it was starting")
        sys.exit(_EXIT_FAILED)
    channel.send(ready)
    EngineLoop(core, channel).run()


def read_config(channel: EngineChannel) -> EngineConfig:
    """The configuration, which also says how to log from now on. Raises ChannelClosed, TimeoutError."""
    config = msgspec.json.decode(channel.receive_first(_CONFIG_TIMEOUT_S), type=EngineConfig)
    configure_logging(log_format=config.log_format, level=config.log_level)
    return config


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    _die_with_parent()
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the API process gets them too, drains, and sends Shutdown
        signal.signal(ignored, signal.SIG_IGN)
    configure_logging()
    channel = EngineChannel(socket.socket(fileno=int(sys.argv[1])))
    try:
        serve(channel, read_config(channel))
    except ChannelClosed:
        return 0
    except Exception:
        logger.exception("the engine failed; the server starts a new one and resumes its requests")
        return _EXIT_FAILED
    channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
