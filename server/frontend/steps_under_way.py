"""Which steps the engine has begun and not finished: if it dies now, one of their requests did it."""


class StepsUnderWay:
    """Written by: SupervisedEngine, from the engine's events. Two at most: a GPU's engine launches a step ahead."""

    def __init__(self) -> None:
        self._newest: list[str] = []
        self._open: dict[int, list[str]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, step_id: int, request_ids: list[str] | None) -> None:
        """request_ids: of the step; None: the same as in the step begun before."""
        if request_ids is not None:
            self._newest = request_ids
        self._open[step_id] = self._newest

    def end(self, step_id: int) -> None:
        """A step that is none, as that of mere statistics, ends nothing."""
        self._open.pop(step_id, None)

    def clear(self) -> None:
        self._newest = []
        self._open.clear()

    @property
    def suspects(self) -> list[str]:
        """Each once, in the order of the steps."""
        return list(dict.fromkeys(request_id for ids in self._open.values() for request_id in ids))
