"""Who arrives next: as a clock finds out, or as it is known beforehand."""

from fedhist.simulation.trial import Trial
from fedhist.world.clock import Clock, Schedule, Start


def clock_of(trial: Trial) -> Clock:
    """Return the clock of a trial at its beginning."""
    return Clock(trial.task.num_clients, trial.k, trial.speeds, trial.seed, trial.concurrency)


class Table:
    """Arrivals that are known beforehand, in the place of a clock."""

    def __init__(self, schedule: Schedule, done: int) -> None:
        self._schedule, self._position = schedule, done * schedule.k

    def upcoming(self, count: int) -> list[Start]:
        """Return the next arrivals."""
        at = slice(self._position, self._position + count)
        schedule = self._schedule
        columns = (table.ravel()[at].tolist() for table in (schedule.arrived, schedule.clients, schedule.versions))
        return [Start(t, at.start + i, c, v) for i, (t, c, v) in enumerate(zip(*columns, strict=True))]

    def take(self, count: int) -> None:
        """Leave the next arrivals behind."""
        self._position += count
