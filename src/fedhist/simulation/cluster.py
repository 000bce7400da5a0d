"""Trials spread over a Ray cluster."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from fedhist.errors import DivergedError, FedHistError, InvalidInput
from fedhist.simulation.hooks import OnRound
from fedhist.simulation.trial import Trial
from fedhist.store.history import History

RETRIES = 3
"""How often a piece of work is begun again when the worker that had it dies."""


def spread(
    run: Callable[..., list[History]],
    trials: Sequence[Trial],
    device: str,
    trainer: str,
    on_round: OnRound | None,
) -> list[History]:
    """Let the workers of a Ray cluster `run` trials; return their histories in the same order.

    The cluster is the one this process is connected to, the one ``RAY_ADDRESS`` names, or one of this machine's own.
    Each GPU gets an equal part of the trials, to train as one batch; without GPUs every trial is a piece of work for
    one core. What a dying worker had not finished is done again by another, with the same result.
    """
    ray = _imported()
    started_here = not ray.is_initialized()
    if started_here:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report its use to its makers
        try:
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = os.environ.get("RAY_ADDRESS", "this machine")
            raise InvalidInput(f"no Ray cluster could be reached or started at {where}: {error}") from error
    pending: dict[Any, list[int]] = {}
    try:
        gpus = 0 if device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
        pieces = [list(range(len(trials)))[i::gpus] for i in range(min(gpus, len(trials)))] if gpus else []
        pieces = pieces or [[i] for i in range(len(trials))]
        work = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0, max_retries=RETRIES)(_piece)
        tasks = {id(trial.task): ray.put(trial.task) for trial in trials}  # sent once, not with every trial
        for piece in pieces:
            parts = [(tasks[id(trials[i].task)], _without_task(trials[i])) for i in piece]
            refs, rests = [ref for ref, _ in parts], [rest for _, rest in parts]
            pending[work.remote(run, refs, rests, device, trainer)] = piece
        histories, diverged = dict[int, History](), dict[int, DivergedError]()
        while pending:
            (ready,), _ = ray.wait(list(pending), num_returns=1)
            piece = pending.pop(ready)
            try:
                done, diverged[piece[0]] = ray.get(ready)
            except ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, FedHistError) else error from None
            except ray.exceptions.RayError as error:
                names, what = "; ".join(str(trials[i]) for i in piece), str(error).strip().splitlines()[0]
                raise FedHistError(f"{names} could not be finished in {RETRIES + 1} attempts: {what}") from error
            histories |= zip(piece, done, strict=True)
            if on_round:
                on_round(trials[piece[0]].rounds, done)
        found = [histories[i] for i in range(len(trials))]
        if all(history.diverged for history in found):
            diverged[0].histories = found
            raise diverged[0]
        return found
    finally:
        for left in pending:  # after an error or an interruption their results are not wanted
            ray.cancel(left, force=True)
        if started_here:
            ray.shutdown()


def _imported() -> Any:
    """Return Ray's module."""
    if "RAY_ADDRESS" not in os.environ and "ray" not in sys.modules:
        # No cluster is named, so nobody else has to reach the one of this machine: it listens on loopback alone.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray  # noqa: PLC0415
    except ImportError:
        raise InvalidInput("engine='ray' needs Ray; install it with: pip install 'fedhist[ray]'.") from None
    return ray


def _without_task(trial: Trial) -> dict[str, Any]:
    names = {field.name for field in fields(trial) if field.init} - {"strategy", "task", "objective"}
    return {"strategy": trial.method, **{name: getattr(trial, name) for name in names}}


def _piece(
    run: Callable[..., list[History]], tasks: Sequence[Any], rests: Sequence[dict[str, Any]], device: str, trainer: str
) -> tuple[Sequence[History], DivergedError | None]:
    """Run some trials, on a worker; return their histories, and the error if all of them diverged."""
    import ray  # noqa: PLC0415

    known = {ref: ray.get(ref) for ref in tasks}  # one object for each task, so that trials share its data
    trials = [Trial(task=known[ref], **rest) for ref, rest in zip(tasks, rests, strict=True)]
    try:
        return run(trials, device=device, trainer=trainer), None
    except DivergedError as error:  # those on other workers may not have
        return error.histories, error
