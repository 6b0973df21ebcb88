"""Fault injection: a runner that fails on purpose. Tests ask for it through EngineConfig.faults; no flag does.

faults: comma-separated. "exit-on-token:ID" ends the process in any step of a request whose tokens hold ID;
"raise-on-token:ID" raises there instead; "hang-on-token:ID" sleeps for an hour; "raise-in:launch" and
"raise-in:collect" raise in every hundredth call, "no-memory-in:..." raises there what a failed allocation does.
"""

import os
import time

from server.errors import ConfigError
from server.runner.interface import Runner
from server.scheduler.batch import SampledTokens, ScheduledBatch

_CALLS_BEFORE_RAISING = 100
_EXIT_STATUS = 70
_KINDS = ("exit-on-token", "raise-on-token", "hang-on-token", "raise-in", "no-memory-in")


class InjectedFault(Exception):
    pass


class FaultyRunner:
    """Wraps a Runner. Written by: itself (the tokens of the rows, to know who is in a step)."""

    def __init__(self, runner: Runner, faults: str) -> None:
        self._runner = runner
        parsed = [_parse(fault) for fault in faults.split(",")]
        self._bad_tokens = {int(arg): kind for kind, arg in parsed if kind.endswith("-on-token")}
        self._stages = {arg: kind for kind, arg in parsed if kind.endswith("-in")}
        self._bad_rows: dict[int, str] = {}
        self._num_calls = 0

    def launch(self, batch: ScheduledBatch) -> object:
        for row in batch.released_rows:
            self._bad_rows.pop(row, None)
        for admitted in batch.admitted:
            for token in admitted.prompt_token_ids:
                if kind := self._bad_tokens.get(token):
                    self._bad_rows[admitted.row] = kind
        for item in batch.items:
            self._strike(self._bad_rows.get(item.row))
        self._raise_in("launch")
        return self._runner.launch(batch)

    def collect(self, handle: object) -> SampledTokens:
        self._raise_in("collect")
        return self._runner.collect(handle)

    def _strike(self, kind: str | None) -> None:
        match kind:
            case "exit-on-token":
                os._exit(_EXIT_STATUS)
            case "raise-on-token":
                raise InjectedFault("raise-on-token")
            case "hang-on-token":
                time.sleep(3600)

    def _raise_in(self, stage: str) -> None:
        self._num_calls += 1
        if stage in self._stages and self._num_calls > _CALLS_BEFORE_RAISING:
            self._num_calls = 0
            raise MemoryError if self._stages[stage] == "no-memory-in" else InjectedFault(f"raise-in:{stage}")


def _parse(fault: str) -> tuple[str, str]:
    kind, colon, argument = fault.partition(":")
    if kind not in _KINDS or not colon:
        raise ConfigError(f"faults: {fault!r} is unknown")
    return kind, argument
