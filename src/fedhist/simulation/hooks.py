"""Who watches a run: functions that are called after every round, and closed when the run ends."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from fedhist.errors import brief, reason, require
from fedhist.store.history import History

OnRound = Callable[[int, Sequence[History]], None]
"""Called after every round with its number and the histories, so far, of the runs that take it together."""
Hooks = OnRound | Sequence[OnRound]


def listed(on_round: Hooks | None) -> list[OnRound]:
    """Return the hooks that an option `on_round` names, or raise unless it is a function or several."""
    given = on_round if isinstance(on_round, Sequence) else [] if on_round is None else [on_round]
    fits = not isinstance(on_round, str) and all(callable(each) for each in given)
    require(fits, f"on_round must be a function or a list of functions, got {brief(on_round)}.")
    return list(given)


@contextlib.contextmanager
def watching(on_round: Hooks | None) -> Iterator[OnRound | None]:
    """Give one function that calls all hooks; at the end, however it comes, close those that have a method `close`.

    The function has no such method, so whoever is given it does not close them: each hook is closed once. What goes
    wrong then is raised when all are closed; where the run itself has failed, that is what is raised, with a note.
    """
    hooks = listed(on_round)

    def call(round_: int, histories: Sequence[History]) -> None:
        for hook in hooks:
            hook(round_, histories)

    failure: BaseException | None = None
    try:
        yield call if hooks else None
    except BaseException as error:
        failure = error
        raise
    finally:
        _close(hooks, failure)


def _close(hooks: Sequence[OnRound], failure: BaseException | None) -> None:
    """Close hooks; the first error is raised, or is a note of what the run has failed of."""
    own: Exception | None = None
    for hook in {id(each): each for each in hooks}.values():
        try:
            if callable(close := getattr(hook, "close", None)):
                close()
        except Exception as error:  # the others are closed all the same
            if failure is None:
                failure = own = error
            else:
                failure.add_note(f"A hook of on_round could not be closed: {type(error).__name__}: {reason(error)}.")
    if own is not None:
        raise own
