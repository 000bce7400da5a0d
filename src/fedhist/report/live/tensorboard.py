"""Evaluations as TensorBoard event files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedhist.errors import FedHistError, InvalidInput, reason
from fedhist.report.live.figures import Seen, figures, fresh
from fedhist.store.history import History


class TensorBoard:
    """An `on_round` hook that writes every evaluation for TensorBoard, in a folder for each method and seed.

    The horizontal axis is the round; virtual time is one of the curves. A run that is resumed from a checkpoint
    passes all its evaluations again, which replace those that an earlier process wrote: none is there twice, and
    none is missing that was not yet on the disk when that process was killed.

    Parameters
    ----------
    folder
        What to give to ``tensorboard --logdir``.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
        except ImportError:
            missing = "TensorBoard's files need its package"
            raise InvalidInput(f"{missing}; install it with: pip install 'fedhist[tensorboard]'.") from None
        self.folder = Path(folder)
        self._make, self._writers = SummaryWriter, dict[str, Any]()
        self._seen: Seen = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(f"{folder} cannot be written: {reason(error)}.") from error

    def __call__(self, round_: int, histories: Sequence[History]) -> None:
        """Write the evaluations that have not been written."""
        try:
            for history, evaluations in fresh(histories, self._seen):
                writer = self._writers.get(history.name) or self._begin(history.name)
                for evaluation in evaluations:
                    for name, value in figures(history, evaluation).items():
                        writer.add_scalar(name, value, evaluation.round)
                writer.flush()
        except OSError as error:
            raise FedHistError(f"{self.folder} cannot be written: {reason(error)}.") from error

    def _begin(self, name: str) -> Any:
        """Return a writer for a run, whose older files are removed."""
        for old in (self.folder / name).glob("events.out.tfevents.*"):
            old.unlink()
        self._writers[name] = self._make(str(self.folder / name))
        return self._writers[name]

    def close(self) -> None:
        """Write what is left; a run that is passed after that is written from its first evaluation on."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        self._seen.clear()
