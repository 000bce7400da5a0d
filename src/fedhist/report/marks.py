"""What was not as usual in runs: attackers, faults, rejected uploads, noise, restarts."""

from collections import Counter
from typing import NamedTuple

from fedhist.report.figure import listed
from fedhist.report.gather import Group
from fedhist.report.measure import known
from fedhist.store.events import RESUMED, Event, times
from fedhist.store.history import ACCOUNT, DIVERGED, History
from fedhist.store.measure import counted

ATTACK = "attack"
EXPECTED = frozenset((ACCOUNT, ATTACK, "joined", "returned", "enough nodes", RESUMED))
"""Events of a run in which nothing went wrong."""


class Badge(NamedTuple):
    """A few words below the title of a section."""

    kind: str
    """Of what weight: "bad", "odd" or "plain"."""
    text: str


def attackers(history: History) -> frozenset[int]:
    """Return the clients that attack."""
    named = [event.get("clients") for event in history.events if event["event"] == ATTACK]
    return frozenset(c for each in named if isinstance(each, list) for c in each if isinstance(c, int))


def trouble(history: History) -> list[Event]:
    """Return the events that say that something went wrong."""
    return [event for event in history.events if event["event"] not in EXPECTED]


def badges(group: Group) -> list[Badge]:
    """Return what a reader must know of a group before its figures."""
    histories, found = [run.history for run in group.runs], list[Badge]()
    attacked = [history for history in histories if attackers(history)]
    if attacked:
        first = attacked[0]
        what = next((str(event.get(ATTACK, "")) for event in first.events if event["event"] == ATTACK), "")
        of = f" of {first.setting['clients']:,}" if isinstance(first.setting.get("clients"), int) else ""
        runs = "" if len(attacked) == len(histories) else f" in {len(attacked)} of {counted(len(histories), 'run')}"
        found.append(Badge("bad", f"{len(attackers(first))}{of} clients attack{runs}: {what}"))
    if diverged := sum(history.diverged for history in histories):
        found.append(Badge("bad", f"{diverged} of {counted(len(histories), 'run')} diverged"))
    total = Counter[str]()
    for history in histories:
        for event in trouble(history):
            total[str(event["event"])] += times(event)
    total.pop(DIVERGED, None)
    if total:
        found.append(Badge("odd", listed(f"{count:,} × {kind}" for kind, count in total.most_common(4))))
    spent = known(history.evaluations[-1].epsilon for history in histories if history.evaluations)
    if spent:
        found.append(Badge("plain", f"private, ε up to {max(spent):.3g}"))
    if resumed := sum(event["event"] == RESUMED for history in histories for event in history.events):
        found.append(Badge("plain", f"resumed {counted(resumed, 'time')}"))
    if any(history.deployed for history in histories):
        found.append(Badge("plain", "a deployment: time is in seconds"))
    return found
