"""The folder of a run: claimed before the work begins, and enough to resume from until it is done."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from fedhist import __version__
from fedhist.command.settings import Settings
from fedhist.errors import FedHistError, InvalidInput, reason
from fedhist.store.files import parse_json, read_text, whole_file

CONFIG, CHECKPOINT, BEGUN = "config.toml", "checkpoint", "begun.json"
COMMANDS = ("run", "compare")


def from_here(path: Path) -> Path:
    """Return a path relative to the current folder, if it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


class RunFolder:
    """Where a command keeps its settings, its checkpoints while it runs, and its results.

    It is unfinished as long as there is a folder `checkpoint` in it.
    """

    def __init__(self, path: Path, command: str, settings: Settings, created: list[Path] | None) -> None:
        self.path, self.command, self.settings = path, command, settings
        self._created = created

    @classmethod
    def begin(cls, path: Path | None, name: str, command: str, settings: Settings) -> RunFolder:
        """Claim a folder, which must be empty or not exist; without a path, a new one below `runs`."""
        if path is None:
            path = base = Path("runs") / name
            count = 1
            while path.exists():
                count += 1
                path = base.with_name(f"{base.name}-{count}")
        paths = {name: Path(each).resolve() for name in ("data_dir", "schedule") if (each := settings[name])}
        settings = settings.having(**paths)  # it may be resumed from elsewhere
        with _writing(path):
            path = path.resolve()
            if (path / CHECKPOINT).is_dir():
                raise InvalidInput(
                    f"out={from_here(path)} is unfinished; resume it with: fedhist resume {from_here(path)}"
                )
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise InvalidInput(f"out={from_here(path)} exists already; choose another folder.")
            folder = cls(path, command, settings, [each for each in (path, *path.parents) if not each.exists()])
            try:
                (path / CHECKPOINT).mkdir(parents=True)
                settings.write(path / CONFIG)
                with whole_file(path / CHECKPOINT / BEGUN) as part:
                    part.write_text(json.dumps({"command": command, "fedhist": __version__}) + "\n")
            except OSError:
                folder.abandon()
                raise
        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder | None:
        """Open the folder of a run that was stopped; None if the run is finished."""
        if not path.is_dir():
            raise InvalidInput(f"{path} is not the folder of a run.")
        path = path.resolve()
        begun, config = path / CHECKPOINT / BEGUN, path / CONFIG
        if not config.is_file():
            raise InvalidInput(f"{from_here(path)} holds no {CONFIG}, so there is nothing to resume.")
        if not (path / CHECKPOINT).is_dir():
            return None
        try:
            stored = parse_json(read_text(begun))
            command, version = stored["command"], stored["fedhist"]
        except FileNotFoundError:
            raise InvalidInput(f"{from_here(path)} was stopped before it began; delete it and start again.") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"{from_here(begun)} cannot be read: {reason(error)}.") from error
        if command not in COMMANDS:
            raise InvalidInput(f"{from_here(begun)} names the unknown command {command!r}.")
        if version != __version__:
            raise FedHistError(
                f"{from_here(path)} was begun with fedhist {version} and cannot be resumed to the bit with "
                f"{__version__}."
            )
        return cls(path, command, Settings.read(config), None)

    @property
    def checkpoint(self) -> Path:
        """The folder for checkpoints."""
        return self.path / CHECKPOINT

    def home(self, run: str) -> Path:
        """Return the folder of one run's results."""
        return self.path if self.command == "run" else self.path / run

    @property
    def tensorboard(self) -> Path:
        """The folder for TensorBoard's files; if it exists, they are wanted."""
        return self.path / "tensorboard"

    @property
    def saved(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return any(self.checkpoint.glob("runs-*.safetensors"))

    def abandon(self, *, with_checkpoints: bool = False) -> None:
        """Leave nothing behind of a run that was begun here and has nothing to show."""
        from fedhist.store.recording import FILES  # noqa: PLC0415

        if self._created is None or (self.saved and not with_checkpoints):
            return
        for folder in (self.checkpoint, self.tensorboard):
            shutil.rmtree(folder, ignore_errors=True)
        (self.path / CONFIG).unlink(missing_ok=True)
        for file in [file for name in FILES for file in self.path.rglob(name)]:
            file.unlink()
            with contextlib.suppress(OSError):
                file.parent.rmdir()
        with contextlib.suppress(OSError):
            for folder in self._created:
                folder.rmdir()

    @contextlib.contextmanager
    def finishing(self) -> Iterator[Path]:
        """Give the folder for the results; when they are all written, the run is finished."""
        with _writing(self.path):
            yield self.path
            for left in self.path.rglob(".*.part"):  # by a process that was killed while it wrote
                left.unlink()
            done = self.path / f".{CHECKPOINT}"
            self.checkpoint.replace(done)  # at once, where removing a folder takes several steps
            shutil.rmtree(done)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidInput(f"out={from_here(path)} cannot be written: {error.strerror}.") from error
