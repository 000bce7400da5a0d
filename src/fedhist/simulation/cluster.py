"""Trials spread over a Ray cluster."""

import contextlib
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from fedhist.errors import DivergedError, FedHistError, InvalidInput, as_path, reason, require
from fedhist.simulation.checkpoint import Interrupted, asked_to_stop, claimed
from fedhist.simulation.hooks import OnRound
from fedhist.simulation.mirror import Begun, Done, Keeper, Message, Recorded, Saved, Warned, sweep, work
from fedhist.simulation.regroup import divide
from fedhist.simulation.run import recordings_of
from fedhist.simulation.trial import Trial
from fedhist.store.history import History
from fedhist.store.recording import ABOUT, check_room, start_of

ATTEMPTS = 4
"""How often a piece of work is given to a worker that dies without having saved anything new."""
PATIENCE = 0.5
"""Seconds after which it is looked whether Ctrl-C was pressed."""
PROBE_SECONDS = 10.0
"""Seconds that a cluster has to answer at its address."""
UNREAD = 4
"""Messages of a worker that wait to be read, before it waits itself."""


def spread(
    run: Callable[..., list[History]],
    trials: Sequence[Trial],
    device: str = "auto",
    trainer: str = "auto",
    on_round: OnRound | None = None,
    checkpoint: str | Path | None = None,
    *,
    gpu_share: float = 1.0,
    **how: Any,
) -> list[History]:
    """Let the workers of a Ray cluster `run` trials; return their histories in the same order.

    The cluster is the one this process is connected to, the one ``RAY_ADDRESS`` names, or one of this machine's own.
    Each GPU, or each share of one, gets an equal part of the trials, to train as one batch; without GPUs every trial is
    a piece of work for one core. What a dying worker had is resumed by another from its last checkpoint; without
    checkpoints, it is begun anew. The result is the same.
    """
    ray = _imported()
    folder = None if checkpoint is None else as_path("checkpoint", checkpoint)
    with contextlib.ExitStack() as stack:
        asked: list[int] = []
        if folder is not None:
            stack.enter_context(claimed(folder, "runs-*"))
        recordings = recordings_of(trials)
        if folder is None or not any(folder.glob("runs-*.safetensors")):
            check_room(recordings, resumable=folder is not None)
        for record, about in recordings.items():
            if (record / ABOUT).exists():
                start_of(record, about)
        stack.enter_context(_connected(ray))
        if folder is not None:  # after connecting, since Ray has a handler of its own
            asked = stack.enter_context(asked_to_stop())
        require(
            ray.cluster_resources().get("CPU", 0) >= 1,
            "the Ray cluster has no core to give; start it on a machine with one, or with a larger --num-cpus.",
        )
        gpus = 0 if device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
        pieces = _pieces(len(trials), gpus, gpu_share)
        if folder is not None:
            divide(folder, pieces)
        how |= {"device": device, "trainer": trainer, "on_round": None, "gpu_share": gpu_share}
        remote = ray.remote(
            num_cpus=1,
            num_gpus=gpu_share if gpus else 0,
            max_retries=0,  # Ray would begin anew
            num_returns="streaming",
            _generator_backpressure_num_objects=UNREAD,
        )(_work)
        tasks = {id(trial.task): ray.put(trial.task) for trial in trials}  # sent once, not with every trial

        def begin(piece: Sequence[int], begun: Begun) -> Any:
            parts = {i: (tasks[id(trials[i].task)], _without_task(trials[i])) for i in piece}
            return remote.remote(run, parts, ray.put(begun), None if folder is None else str(folder), how)

        keeper = Keeper(folder, trials)
        return _Driver(ray, trials, keeper, begin, asked, on_round).drive(pieces)


def _pieces(trials: int, gpus: int, share: float) -> list[list[int]]:
    """Return which trials make up each piece of work."""
    places = gpus * int(1 / share + 1e-9) or trials  # a share lies on one GPU
    return [list(range(trials))[i::places] for i in range(min(places, trials))]


class _Driver:
    """Gives pieces of work to workers, and keeps what they send."""

    def __init__(
        self,
        ray: Any,
        trials: Sequence[Trial],
        keeper: Keeper,
        begin: Callable[[Sequence[int], Begun], Any],
        asked: Sequence[int],
        on_round: OnRound | None,
    ) -> None:
        self.on_round: OnRound = on_round or (lambda *_: None)
        self.ray, self.trials, self.keeper, self.begin, self.asked = ray, trials, keeper, begin, asked
        self.pending: dict[Any, Sequence[int]] = {}
        self.failed: dict[int, int] = {}
        """By its first trial, how often a piece of work has failed since it was last further than ever before."""
        self.reached: dict[str, int] = {}
        """The round of each checkpoint's file."""

    def drive(self, pieces: Sequence[Sequence[int]]) -> list[History]:
        """Return the histories of all trials."""
        histories, diverged = dict[int, History](), dict[int, DivergedError | None]()
        try:
            for piece in pieces:
                self.pending[self.begin(piece, self.keeper.begun(piece))] = piece
            while self.pending:
                for piece, message in self._messages():
                    if isinstance(message, Done):
                        histories |= zip(piece, message.histories, strict=True)
                        diverged[piece[0]] = message.diverged
                        self.on_round(max(history.rounds for history in message.histories), message.histories)
                    else:
                        self._keep(piece, message)
                if self.asked and self.pending:
                    raise Interrupted(self.keeper.round, self.asked[0])
        finally:
            for left in self.pending:  # after an error or an interruption their results are not wanted
                self.ray.cancel(left, force=True)
        return self._finished([histories[i] for i in range(len(self.trials))], diverged[0])

    def _finished(self, found: list[History], first: DivergedError | None) -> list[History]:
        """Return the histories of all trials; raise if all diverged, of which `first` is the first one's error."""
        for trial, history in zip(self.trials, found, strict=True):
            if trial.record is not None:  # not the worker's folder
                history.setting["record"] = trial.described()["record"]
        if first is not None and all(history.diverged for history in found):
            first.histories = found
            raise first
        for trial, history in zip(self.trials, found, strict=True):
            if trial.record is not None:
                history.save(trial.record)
        return found

    def _keep(self, piece: Sequence[int], message: Saved | Recorded | Warned) -> None:
        """Keep what was sent on the way; a piece of work that is further than ever before may fail again as often."""
        if isinstance(message, Warned):
            warnings.warn(message.warning, stacklevel=5)
            return
        self.keeper.keep(message)
        if isinstance(message, Saved) and message.round > self.reached.get(message.name, 0):
            self.reached[message.name] = message.round
            self.failed.pop(piece[0], None)

    def _messages(self) -> Iterator[tuple[Sequence[int], Message]]:
        """Return the next message, if there is one soon; what a dead worker had is given to another."""
        ready, _ = self.ray.wait(list(self.pending), timeout=PATIENCE, fetch_local=False)
        for stream in ready:
            piece = self.pending[stream]
            try:
                message = self.ray.get(next(stream))
            except self.ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, FedHistError) else error from None
            except (self.ray.exceptions.RayError, StopIteration) as error:
                del self.pending[stream]
                self.ray.cancel(stream, force=True)  # what it sent may be unreadable while it is alive
                self._again(piece, error)
                continue
            if isinstance(message, Done):
                del self.pending[stream]
            yield piece, message

    def _again(self, piece: Sequence[int], error: BaseException) -> None:
        self.failed[piece[0]] = self.failed.get(piece[0], 0) + 1
        if self.failed[piece[0]] == ATTEMPTS:
            names = "; ".join(str(self.trials[i]) for i in piece)
            what = (str(error).strip().splitlines() or ["its worker ended"])[0]
            raise FedHistError(f"{names} could not be finished in {ATTEMPTS} attempts: {what}") from error
        self.pending[self.begin(piece, self.keeper.begun(piece))] = piece


@contextlib.contextmanager
def _connected(ray: Any) -> Iterator[None]:
    """Be connected to a cluster."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report its use to its makers
    _probe(os.environ.get("RAY_ADDRESS", ""))
    address = "local" if not os.environ.get("RAY_ADDRESS") and _has_died() else None
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, include_dashboard=False, log_to_driver=False, configure_logging=False)
    except Exception as error:  # of any kind: on a busy machine a plain Exception, after 30 seconds
        ray.shutdown()  # what it had begun
        where = os.environ.get("RAY_ADDRESS")
        token = "; one that asks for a token needs RAY_AUTH_MODE=token and its token" if where else ""
        sentence = f"no Ray cluster could be reached or started at {where or 'this machine'}: {reason(error)}{token}."
        raise InvalidInput(sentence) from error
    try:
        yield
    finally:
        ray.shutdown()
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray has put one of its own in its place
        sweep()


def _probe(address: str) -> None:
    """Raise unless something listens where a cluster is said to be, which Ray takes minutes to find out."""
    wanted = "set it to the HOST:PORT that `ray start --head` printed, on a machine of the cluster"
    require("://" not in address, f"RAY_ADDRESS={address} is one of Ray's client; {wanted}.")
    if ":" not in address:  # auto, local
        return
    try:
        _reach(address)
    except (OSError, ValueError, OverflowError) as error:
        raise InvalidInput(f"no Ray cluster answers at RAY_ADDRESS={address} ({reason(error)}); {wanted}.") from None


def _has_died() -> bool:
    """Return whether Ray has a note of a cluster on this machine at which nothing listens, for which it would wait."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        _reach((Path(folder) / "ray" / "ray_current_cluster").read_text().strip())
    except FileNotFoundError:
        return False
    except (OSError, ValueError, OverflowError):
        return True
    return False


def _reach(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS).close()


def _imported() -> Any:
    """Return Ray's module."""
    here = (os.environ.get("RAY_ADDRESS") or "local").startswith(("127.0.0.1", "localhost", "local"))
    if "ray" not in sys.modules and here:
        # Nobody else has to reach a cluster of this machine: it listens on loopback alone.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray  # noqa: PLC0415
    except ImportError:
        raise InvalidInput("engine='ray' needs Ray; install it with: pip install 'fedhist[ray]'.") from None
    return ray


def _without_task(trial: Trial) -> dict[str, Any]:
    names = {field.name for field in fields(trial) if field.init} - {"strategy", "task", "objective"}
    return {"strategy": trial.method, **{name: getattr(trial, name) for name in names}}


def _work(
    run: Callable[..., list[History]],
    parts: Mapping[int, tuple[Any, dict[str, Any]]],
    begun: Begun,
    folder: str | None,
    how: Mapping[str, Any],
) -> Iterator[Message]:
    """Carry out a piece of work, on a worker."""
    import ray  # noqa: PLC0415

    known = {ref: ray.get(ref) for ref, _ in parts.values()}  # one object for each task, so that trials share its data

    def made(task: Any, rest: Mapping[str, Any], record: Path | None) -> Trial:
        return Trial(task=task, **{**rest, "record": None if rest["record"] is None else record})

    trials = {i: partial(made, known[ref], rest) for i, (ref, rest) in parts.items()}
    yield from work(run, trials, begun, folder, **how)
