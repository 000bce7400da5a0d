"""Evaluations as TensorBoard event files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fedhist.errors import FedHistError, InvalidInput
from fedhist.report.live.figures import Seen, figures, fresh

if TYPE_CHECKING:
    from fedhist.store.history import History


class TensorBoard:
    """An `on_round` hook that writes every evaluation for TensorBoard, in a folder for each method and seed.

    The horizontal axis is the round; virtual time is one of the curves. A run that goes on from a checkpoint
    tells all its evaluations anew, and so they replace what an earlier process wrote of it: nothing is there
    twice, and nothing is missing that was not yet on the disk when the process was killed.

    Parameters
    ----------
    folder
        What to give to ``tensorboard --logdir``.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
        except ImportError:
            raise InvalidInput(
                "TensorBoard's files need its package; install it with: pip install 'fedhist[tensorboard]'."
            ) from None
        self.folder = Path(folder)
        self._make, self._writers = SummaryWriter, dict[str, Any]()
        self._seen: Seen = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(f"{folder} cannot be written: {error.strerror}.") from error

    def __call__(self, round_: int, histories: Sequence[History]) -> None:
        """Write the evaluations that have not been written."""
        try:
            for history, evaluations in fresh(histories, self._seen):
                writer = self._writer(history, anew=evaluations[0] is history.evaluations[0])
                for evaluation in evaluations:
                    for name, value in figures(history, evaluation).items():
                        writer.add_scalar(name, value, evaluation.round)
                writer.flush()
        except OSError as error:
            raise FedHistError(f"{self.folder} cannot be written: {error.strerror or error}.") from error

    def _writer(self, history: History, *, anew: bool) -> Any:
        name, folder = history.name, self.folder / history.name
        if anew:
            if name in self._writers:
                self._writers.pop(name).close()
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
            self._writers[name] = self._make(str(folder))
        return self._writers[name]

    def close(self) -> None:
        """Write what is left; calling the hook again is an error."""
        for writer in self._writers.values():
            writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
