"""Which clock a world needs, and whole schedules by it."""

from fedhist.errors import require, whole
from fedhist.world.availability import Availability, as_availability
from fedhist.world.clock import Clock
from fedhist.world.closing import Closing, FirstK, as_closing
from fedhist.world.events import EventClock
from fedhist.world.fleet import Fleet
from fedhist.world.schedule import Schedule
from fedhist.world.speeds import Speeds

AnyClock = Clock | EventClock
MOST_UPLOADS = 1_000_000
"""Uploads up to a time beyond which a mistake is assumed: to find them all would take long."""
FEW = 64
"""Rounds that are tried first where only a time is given."""


def busy_clients(num_clients: int, closing: Closing, concurrency: int | None) -> int:
    """Return how many clients work at a time, or raise if there are not so many."""
    least = closing.needed
    require(least <= num_clients, f"k={least} is more than the {num_clients} clients there are.")
    if closing.sample is not None:
        require(concurrency is None, f"concurrency is what {closing} says; leave it out.")
        return min(closing.sample, num_clients)
    busy = num_clients if concurrency is None else whole("concurrency", concurrency)
    fits = least <= busy <= num_clients
    require(fits, f"concurrency must lie between k={least} and the number of clients {num_clients}, got {busy}.")
    return busy


def clock_of(fleet: Fleet, closing: Closing, concurrency: int | None = None, *, rejecting: bool = False) -> AnyClock:
    """Return the clock of a run at its beginning: the fast one where it will do.

    Where uploads are rejected, a synchronous round goes on without those who sent them, and may have fewer.
    """
    busy = busy_clients(len(fleet), closing, concurrency)
    plain = fleet.availability is None and closing.seconds is None and closing.sample in (None, closing.enough)
    plain = plain and not (rejecting and closing.sample is not None)
    return Clock(fleet, closing.most(busy), busy) if plain else EventClock(fleet, closing, busy)


def schedule_of(fleet: Fleet, closing: Closing, rounds: int, concurrency: int | None = None) -> Schedule:
    """Let the clients work and return the uploads of every round."""
    return clock_of(fleet, closing, concurrency).advance(rounds)


def rounds_until(fleet: Fleet, closing: Closing, until: float, concurrency: int | None, most: int | None) -> int:
    """Return how many rounds close up to a time, `most` at most."""
    ceiling = max(1, MOST_UPLOADS // closing.needed)
    limit = min(most or ceiling, ceiling)
    rounds = min(FEW, limit)
    while True:
        clock = clock_of(fleet, closing, concurrency)
        if isinstance(clock, EventClock):
            found = clock.advance(limit, until).rounds
            break
        found = int((clock.advance(rounds).time <= until).sum())
        if found < rounds or rounds == limit:
            break
        rounds = min(2 * rounds, limit)
    require(
        found < ceiling, f"until={until:g} is more than {MOST_UPLOADS:,} uploads away; give a smaller one, or rounds."
    )
    require(found > 0, f"until={until:g} is over before the first round closes.")
    return found


def make_schedule(
    num_clients: int,
    k: int | Closing | str,
    rounds: int,
    speeds: Speeds | str,
    seed: int = 0,
    concurrency: int | None = None,
    availability: Availability | str | None = None,
) -> Schedule:
    """Let the clients work and return the uploads of every round, by default the first `k`.

    Parameters
    ----------
    num_clients
        The number of clients N.
    k
        Uploads that close a round, or another way to close it: :class:`Synchronous`, "deadline:seconds=5".
    rounds
        How many rounds there are.
    speeds
        How long clients take: an object such as :class:`LogNormal`, or a string such as "pareto:alpha=1".
    seed
        Seed of speeds and arrivals.
    concurrency
        How many clients work at a time. None keeps all of them busy. With fewer, the clients sent the
        new model are drawn at random from those that are idle.
    availability
        When clients are there; always by default.
    """
    closing = as_closing(k, None) if isinstance(k, (Closing, str)) else FirstK(k)
    fleet = Fleet.of(num_clients, speeds, whole("seed", seed), availability=as_availability(availability))
    return schedule_of(fleet, closing, whole("rounds", rounds, 1), concurrency)
