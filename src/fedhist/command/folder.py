"""The folder of a run: claimed before the work begins, and all that is needed to resume it."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from fedhist import __version__
from fedhist.command.settings import Settings
from fedhist.errors import FedHistError, InvalidInput, reason, require
from fedhist.store.files import parse_json, read_text, slug, whole_file

CONFIG, CHECKPOINT, BEGUN = "config.toml", "checkpoint", "begun.json"


def from_here(path: Path) -> Path:
    """Return a path relative to the current folder, if it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


class RunFolder:
    """Where a command keeps its settings, its checkpoints while it runs, and its results.

    The run is unfinished as long as there is a folder `checkpoint` in it.
    """

    def __init__(self, path: Path, command: str, settings: Settings, created: list[Path] | None) -> None:
        self.path, self.command, self.settings = path, command, settings
        self._created = created
        """Folders that this process made, the innermost first; None for a run that is resumed."""

    @classmethod
    def begin(cls, path: Path | None, name: str, command: str, settings: Settings) -> Self:
        """Claim a folder, which must be empty or not exist; without a path, a new one below `runs`."""
        from fedhist.command.experiment import completed  # noqa: PLC0415

        if path is None:
            path = base = Path("runs") / slug(f"{settings['dataset']}-{name}-seed{settings['seed']}")
            count = 1
            while path.exists():
                count += 1
                path = base.with_name(f"{base.name}-{count}")
        # It may be resumed from elsewhere, and run again with a version that has other defaults.
        files = {name: Path(each).resolve() for name in ("data_dir", "schedule") if (each := settings[name])}
        settings = completed(settings, **files)
        with _writing(path):
            path = path.resolve()
            relative = from_here(path)
            begun, free = (path / CHECKPOINT).is_dir(), not path.exists() or (path.is_dir() and not any(path.iterdir()))
            require(not begun, f"out={relative} is unfinished; resume it with: fedhist resume {relative}")
            require(free, f"out={relative} exists already; choose another folder.")
            folder = cls(path, command, settings, [each for each in (path, *path.parents) if not each.exists()])
            try:
                folder.checkpoint.mkdir(parents=True)
                settings.write(path / CONFIG)
                with whole_file(folder.checkpoint / BEGUN) as part:
                    part.write_text(json.dumps({"command": command, "fedhist": __version__}) + "\n")
            except OSError:
                folder.abandon()
                raise
        return folder

    @classmethod
    def reopen(cls, path: Path) -> Self | None:
        """Open the folder of a run that was stopped; None if the run is finished."""
        require(path.is_dir(), f"{path} is not the folder of a run.")
        path = path.resolve()
        relative, begun, config = from_here(path), path / CHECKPOINT / BEGUN, path / CONFIG
        require(config.is_file(), f"{relative} holds no {CONFIG}, so there is nothing to resume.")
        if not begun.parent.is_dir():
            return None
        try:
            stored = parse_json(read_text(begun))
            command, version = stored["command"], stored["fedhist"]
        except FileNotFoundError:
            raise InvalidInput(f"{relative} was stopped before it began; delete it and start again.") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"{from_here(begun)} cannot be read: {reason(error)}.") from error
        require(command in ("run", "compare"), f"{from_here(begun)} names the unknown command {command!r}.")
        if version != __version__:
            begun_with = f"{relative} was begun with fedhist {str(version)[:100]}"
            raise FedHistError(f"{begun_with} and cannot be resumed to the bit with {__version__}.")
        folder = cls(path, command, Settings.read(config), None)
        fits = folder.settings["engine"] == "local" or not folder.saved
        require(fits, f"{relative} was begun with engine='local' and can only be resumed so; see its {CONFIG}.")
        return folder

    @property
    def checkpoint(self) -> Path:
        """The folder for checkpoints."""
        return self.path / CHECKPOINT

    @property
    def tensorboard(self) -> Path:
        """The folder for TensorBoard's files; if it exists, they are wanted."""
        return self.path / "tensorboard"

    def home(self, run: str) -> Path:
        """Return the folder of one run's results."""
        return self.path if self.command == "run" else self.path / run

    @property
    def saved(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return any(self.checkpoint.glob("runs-*.safetensors"))

    def abandon(self, *, with_checkpoints: bool = False) -> None:
        """Remove all traces of a run that was begun by this process, unless it can be resumed."""
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
    def finishing(self) -> Iterator[None]:
        """Let results be written; after that the run is finished."""
        with _writing(self.path):
            yield
            for left in self.path.rglob(".*.part"):  # by a process that was killed while it wrote
                left.unlink()
            done = self.path / f".{CHECKPOINT}"
            self.checkpoint.replace(done)  # in one step, where removing a folder takes several
            shutil.rmtree(done)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidInput(f"out={from_here(path)} cannot be written: {error.strerror}.") from error
