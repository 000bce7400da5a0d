"""The folder of a run: claimed before the work begins, and all that is needed to resume it."""

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from fedhist import __version__
from fedhist.command.settings import Settings
from fedhist.errors import FedHistError, InvalidInput, brief, reason, require
from fedhist.options import with_absolute_files
from fedhist.store.files import locked, parse_json, read_text, remove_parts, slug, whole_file

CONFIG, CHECKPOINT, BEGUN, SUMMARY, TUNED = "config.toml", "checkpoint", "begun.json", "summary.json", "tuned.toml"
STEPS = "step-[0-9]*"
"""What a search keeps of each step: a file when it is finished, and a folder with the states of its runs."""
COMMANDS = ("run", "compare", "tune", "plan")
"""Those that can be resumed."""
MOST_ATTEMPTS = 100
"""How often a folder is made that others remove at the same time."""


def from_here(path: Path) -> Path:
    """Return a path relative to the current folder, if it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


class RunFolder:
    """Where a command keeps its settings, its checkpoints while it runs, and its results.

    The run is unfinished as long as there is a folder `checkpoint` in it.
    """

    def __init__(
        self,
        path: Path,
        command: str,
        settings: Settings,
        own: Mapping[str, Any],
        lock: contextlib.ExitStack,
        created: list[Path] | None,
    ) -> None:
        self.path, self.command, self.settings, self._lock = path, command, settings, lock
        self.own = own
        """What the command was told besides settings."""
        self._created = created
        """Folders that this process made, the innermost first; None for a run that is resumed."""
        self._homes = {path}
        """Folders with results of these runs. What else lies below may belong to others."""

    @classmethod
    def begin(
        cls, path: Path | None, name: str, command: str, settings: Settings, own: Mapping[str, Any] | None = None
    ) -> Self:
        """Claim a folder, which must be empty or not exist; without a path, a new one below `runs`."""
        from fedhist.command.experiment import completed  # noqa: PLC0415

        # It may be resumed from elsewhere, and run again with a version that has other defaults.
        files = _absolute(settings)
        if settings["arm"]:
            files["arm"] = [
                {**arm, **{name: str(each) for name, each in _absolute(arm).items()}} for arm in settings["arm"]
            ]
        settings = completed(settings, **files)
        if path is not None:
            return cls._claimed(path, command, settings, own or {})
        base = Path("runs") / f"{slug(settings['dataset'])}-{slug(name)}-seed{settings['seed']}"
        for count in itertools.count(2):
            with contextlib.suppress(Taken):
                return cls._claimed(path or base, command, settings, own or {})
            path = base.with_name(f"{base.name}-{count}")
        raise AssertionError  # it counts for ever

    @classmethod
    def _claimed(cls, path: Path, command: str, settings: Settings, own: Mapping[str, Any]) -> Self:
        """Begin in a folder that nobody uses. All that is done there is done by the one process that has its lock."""
        with _writing(path), contextlib.ExitStack() as stack:
            path = Path(os.path.realpath(path))  # unlike resolve(), of a loop of links too
            created = [each for each in (path, *path.parents) if not each.exists()]
            stack.enter_context(_hold(path))
            begun, part = path / CHECKPOINT, path / f".{CHECKPOINT}.part"
            relative = from_here(path)
            if begun.exists() and not begun.is_symlink():
                raise Taken(f"out={relative} is unfinished; resume it with: fedhist resume {relative}")
            if any(each != part for each in path.iterdir()):
                raise Taken(f"out={relative} exists already; choose another folder.")
            folder = cls(path, command, settings, own, stack.pop_all(), created)
            try:
                if part.exists():  # by a process that was killed as it began
                    shutil.rmtree(part)
                part.mkdir()
                settings.write(part / CONFIG)
                with whole_file(part / BEGUN) as file:
                    begun_by = {"command": command, "fedhist": __version__, **({"own": own} if own else {})}
                    file.write_text(json.dumps(begun_by) + "\n")
                part.rename(begun)  # from here on the run has begun, with all that is needed to resume it
                folder._show_settings()
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                folder.abandon()
                folder.close()
                raise
        return folder

    @classmethod
    def reopen(cls, path: Path) -> Self | None:
        """Open the folder of a run that was stopped; None if the run is finished."""
        require(path.is_dir(), f"{path} is not the folder of a run.")
        path = path.resolve()
        relative, begun, config = from_here(path), path / CHECKPOINT / BEGUN, path / CONFIG
        with _writing(path), contextlib.ExitStack() as stack:
            stack.enter_context(_hold(path))
            require(not begun.parent.is_symlink(), f"{from_here(begun.parent)} is a link, not the folder of a run.")
            left = config.is_file() or (begun.parent / CONFIG).is_file()
            require(left, f"{relative} holds no {CONFIG}, so there is nothing to resume.")
            if not begun.parent.is_dir():
                results = *path.glob(SUMMARY), *path.glob(f"*/{SUMMARY}"), path / TUNED
                finished = any(each.is_file() for each in results)
                require(finished, f"{relative} holds no run, so there is nothing to resume.")
                _remove_done(path / f".{CHECKPOINT}")
                return None
            command, own = _begun_by(begun, relative)
            settings = Settings.read(config if config.is_file() else begun.parent / CONFIG)
            folder = cls(path, command, settings, own, stack, None)
            if command == "run":
                folder.settings.require_one()
            folder._show_settings()
            folder._lock = stack.pop_all()
        return folder

    def _show_settings(self) -> None:
        """Put the settings where they stay when the run is finished."""
        if not (self.path / CONFIG).exists():
            (self.checkpoint / CONFIG).replace(self.path / CONFIG)

    def close(self) -> None:
        """Let other processes use the folder."""
        self._lock.close()

    @property
    def checkpoint(self) -> Path:
        """The folder for checkpoints."""
        return self.path / CHECKPOINT

    @property
    def tensorboard(self) -> Path:
        """The folder for TensorBoard's files; if it exists, they are wanted."""
        return self.path / "tensorboard"

    @property
    def log(self) -> Path:
        """The file for rounds and events as JSON; if it exists, they are wanted."""
        return self.path / "log.jsonl"

    def home(self, run: str) -> Path:
        """Return the folder of one run's results."""
        home = self.path if self.command == "run" else self.path / run
        self._homes.add(home)
        return home

    @property
    def saved(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return any(any(self.checkpoint.glob(pattern)) for pattern in ("**/runs-*.safetensors", f"{STEPS}.json"))

    def abandon(self, *, with_checkpoints: bool = False) -> None:
        """Remove all traces of a run that was begun by this process, unless it can be resumed."""
        from fedhist.store.recording import FILES  # noqa: PLC0415

        if self._created is None or (self.saved and not with_checkpoints):
            return
        for folder in (self.checkpoint, self.tensorboard):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.path / CONFIG, self.log):
            file.unlink(missing_ok=True)
        for home in self._homes:
            for name in FILES:
                (home / name).unlink(missing_ok=True)
            if home != self.path:
                with contextlib.suppress(OSError):
                    home.rmdir()
        with contextlib.suppress(OSError):
            for folder in self._created:
                folder.rmdir()

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Let results be written; after that the run is finished."""
        with _writing(self.path, f"; make room, then resume with: fedhist resume {from_here(self.path)}"):
            yield
            for home in self._homes:
                remove_parts(home, ".*.[0-9]*")
            done = self.path / f".{CHECKPOINT}"
            _remove_done(done)
            self.checkpoint.replace(done)  # in one step, where removing a folder takes several
            _remove_done(done)


def _remove_done(checkpoint: Path) -> None:
    """Remove the checkpoints of a run that is finished, and nothing else that may lie there."""
    remove_parts(checkpoint, ".runs-*")
    remove_parts(checkpoint, f".{STEPS}")
    for pattern in ("runs-*.safetensors", f"{STEPS}.json", BEGUN, CONFIG):
        for left in checkpoint.glob(pattern):
            left.unlink()
    for left in checkpoint.glob(STEPS):
        shutil.rmtree(left, ignore_errors=True)
    with contextlib.suppress(OSError):
        checkpoint.rmdir()


class Taken(InvalidInput):
    """A folder cannot be claimed, because another run has it."""


def _hold(path: Path) -> contextlib.ExitStack:
    """Return what holds the lock on a folder, which is made if it does not exist."""
    for attempt in itertools.count():
        with contextlib.ExitStack() as stack:
            try:
                path.mkdir(parents=True, exist_ok=True)
                if stack.enter_context(locked(path)) == path.stat().st_ino:
                    return stack.pop_all()
            except FileNotFoundError:  # another process has removed it just now, since its run could not begin
                if attempt > MOST_ATTEMPTS:
                    raise
            except FileExistsError:
                raise Taken(f"out={from_here(path)} exists already; choose another folder.") from None
            except BlockingIOError:
                raise Taken(f"{from_here(path)} is in use by another process.") from None
    raise AssertionError  # it counts for ever


def _begun_by(begun: Path, relative: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the command that began a run, which must be of this version, and what it was told besides settings."""
    try:
        stored = parse_json(read_text(begun))
        command, version, own = stored["command"], stored["fedhist"], dict(stored.get("own", {}))
    except FileNotFoundError:
        raise InvalidInput(f"{relative} was stopped before it began; delete it and start again.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{from_here(begun)} cannot be read: {reason(error)}.") from error
    require(command in COMMANDS, f"{from_here(begun)} names the unknown command {brief(command)}.")
    if version != __version__:
        begun_with = f"{relative} was begun with fedhist {str(version)[:20]}"
        raise FedHistError(f"{begun_with} and cannot be resumed to the bit with {__version__}.")
    return str(command), own


@contextlib.contextmanager
def _writing(path: Path, remedy: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidInput(f"out={from_here(path)} cannot be written: {reason(error)}{remedy}.") from error


def _absolute(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that name files, with whole paths."""
    files: dict[str, Any] = {
        name: Path(each).resolve() for name in ("data_dir", "schedule") if (each := settings.get(name))
    }
    texts = {name: settings.get(name) for name in ("speeds", "network", "availability")}
    return files | {name: with_absolute_files(text) for name, text in texts.items() if text and "file" in text}
