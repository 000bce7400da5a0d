"""Rounds, events and evaluations as lines of JSON in a file."""

import json
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhist.errors import InvalidInput, reason
from fedhist.report.live.figures import figures
from fedhist.store.events import RESUMED, Event, wall_clock
from fedhist.store.history import Evaluation, History

Line = dict[str, Any]
NEWLINE = b"\n"


@dataclass
class _Written:
    """What the file has of a run: the last round, how many events, and the round of the last evaluation."""

    round: int = 0
    events: int = 0
    evaluation: int = 0

    def go_back(self, events: Sequence[Event]) -> None:
        """Forget what a deployment had done after the checkpoint from which it was resumed: that does not count."""
        if restarts := [place for place, event in enumerate(events) if event["event"] == RESUMED]:
            last = events[restarts[-1]]["round"] - 1
            self.round, self.evaluation = min(self.round, last), min(self.evaluation, last)
            self.events = min(self.events, restarts[-1])


class JsonLines:
    """An `on_round` hook that appends every round, event and evaluation to a file, one JSON object a line.

    Every line has the wall-clock time `at` (ISO 8601, UTC), the name of the `run`, its `id`, which it keeps when it is
    resumed, what `kind` of line it is, and the `round`. `time` is virtual in a simulation, and in a deployment the
    seconds since the first start. What is NaN is null. Lines are only ever appended, those of a call at once; a run
    that is resumed is not written twice. If the file cannot be written for a while, a warning says so, and what is
    missing follows later.

    Parameters
    ----------
    path
        The file; it may hold other runs.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._runs: dict[str, History] = {}
        self._written: dict[str, _Written] = {}
        self._waiting, self._failing = b"", False  # what could not be written yet
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_file():
                self._read()
            self._file: int | None = self._opened()
        except OSError as error:
            raise InvalidInput(f"{path} cannot be written: {reason(error)}.") from error

    def __call__(self, round_: int, histories: Sequence[History]) -> None:
        """Write what is new."""
        self._append([line for history in histories for line in self._new(history)])

    def close(self) -> None:
        """Write what has come since the last round, and let the file go."""
        self._append([line for history in self._runs.values() for line in self._new(history)])
        self._runs.clear()
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._waiting:
            warnings.warn(f"the last {self._waiting.count(NEWLINE)} lines of {self.path} are missing.", stacklevel=2)

    def _read(self) -> None:
        """Note what the file has of each run."""
        text = NEWLINE
        with self.path.open("rb") as file:
            for text in file:
                try:
                    line = json.loads(text)
                    run = self._written.setdefault(str(line["id"]), _Written())
                    if line["kind"] == "event":
                        run.events = int(line["number"])
                    elif line["kind"] == "round":
                        run.round = int(line["round"])
                    elif line["kind"] == "evaluation":
                        run.evaluation = int(line["round"])
                except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                    continue  # not ours, or half a line of a process that was killed
        if not text.endswith(NEWLINE):
            self._waiting = NEWLINE

    def _new(self, history: History) -> list[Line]:
        """Return the lines of a run that have not been written, in order; now they count as such."""
        done, events = self._written.setdefault(history.id, _Written()), list(history.events)
        if history.id not in self._runs:
            done.go_back(events)
        self._runs[history.id] = history
        lines = [
            {"kind": "event", "number": done.events + i, **event} for i, event in enumerate(events[done.events :], 1)
        ]
        lines += [{"kind": "round", **_round(history, row)} for row in range(done.round, history.rounds)]
        evaluations = [each for each in history.evaluations if each.round > done.evaluation]
        lines += [{"kind": "evaluation", **_evaluation(history, each)} for each in evaluations]
        done.round, done.events = max(done.round, history.rounds), max(done.events, len(events))
        done.evaluation = max([done.evaluation, *(each.round for each in evaluations)])
        common = {"at": wall_clock(), "run": history.name, "id": history.id}
        return sorted((common | line for line in lines), key=lambda line: (str(line["at"]), int(line["round"])))

    def _append(self, lines: Sequence[Line]) -> None:
        """Write lines, after those that could not be written before."""
        self._waiting += "".join(map(_text, lines)).encode()
        try:
            if self._file is None and self._waiting:
                self._file = self._opened()
            while self._file is not None and self._waiting:
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]
            self._failing = False
        except OSError as error:
            if not self._failing:  # once is enough, until it has worked again
                warnings.warn(f"{self.path} cannot be written: {reason(error)}; it is tried again.", stacklevel=3)
            self._failing = True

    def _opened(self) -> int:
        """Open the file to append: what is written goes to its end, also when it was truncated meanwhile."""
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


def _round(history: History, row: int) -> Line:
    there = history.clients[row] >= 0  # a round may have closed with fewer
    uploads = {name: getattr(history, name)[row][there].tolist() for name in ("clients", "staleness", "weights")}
    uploads["weights"] = [round(weight, 6) for weight in uploads["weights"]]
    return {"round": row + 1, "time": float(history.closed[row]), **uploads}


def _evaluation(history: History, evaluation: Evaluation) -> Line:
    return {"round": evaluation.round, "time": evaluation.time, "figures": figures(history, evaluation)}


def _text(line: Line) -> str:
    """Return a line as it is written; of all control characters JSON escapes all but one."""
    return json.dumps(_plain(line), allow_nan=False).replace("\x7f", "\\u007f") + "\n"


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, which knows neither NaN nor infinity."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
