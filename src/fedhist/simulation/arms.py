"""What is compared: methods that may differ in anything but the data."""

from collections.abc import Sequence
from typing import Any, Unpack

from fedhist.data.task import Task
from fedhist.errors import InvalidInput, require
from fedhist.options import options_of, plain, unknown_option
from fedhist.simulation.keywords import ArmOptions
from fedhist.simulation.methods import Method, as_method, kind_of
from fedhist.simulation.trial import INSTEAD, NOT_COMPARED, Trial
from fedhist.strategies import Strategy

LOCAL = tuple(name for name, each in options_of(Trial).items() if each.part is not None)
"""Options of the clients' work."""
SHARED = ("seed", "record", "record_dtype")
"""Options of a trial that all arms of a comparison have in common."""


class Arm:
    """A method with options of its own, beside others that may have other ones.

    ``Arm("fedavg", lr=0.1, k=20, name="large K")``: options are those of :class:`Trial` and, one by one, of
    :class:`Local`, by the names that commands and files give them; the rest is what the comparison says for all.

    Parameters
    ----------
    strategy
        A strategy, or a method's name.
    name
        What tables and figures call it; the method's name and its options by default.
    """

    def __init__(
        self, strategy: Strategy | str | Method, *, name: str | None = None, **options: Unpack[ArmOptions]
    ) -> None:
        fits = name is None or (isinstance(name, str) and bool(name.strip()))
        require(fits, f"name must be a string, got {name!r}.")
        known = [*(each for each in options_of(Trial) if each not in SHARED), "local", "objective"]
        for option in options:
            if option not in known:
                raise unknown_option("Arm()", option, known)
        method = as_method(strategy, options.get("objective"))
        self.spec = strategy if isinstance(strategy, str) and "objective" not in options else None
        """The text that names the method in files and commands; None where it was given as an object."""
        self.options = {option: value for option, value in options.items() if option != "objective"}
        texts = ", ".join(f"{option} = {plain(value)}" for option, value in self.options.items())
        label = name or (f"{method.name}, {texts}" if texts else method.name)
        self.method = Method(label, method.strategy, method.objective)

    @property
    def name(self) -> str:
        """What tables and figures call it."""
        return self.method.name

    def trial(self, task: Task, **shared: Any) -> Trial:
        """Return its run on a task, with the options that it shares with others and does not have itself."""
        replaced = {other for pair in INSTEAD for one, other in (pair, pair[::-1]) if one in self.options}
        if str(self.options.get("closing")).lower().startswith("synchronous"):  # which says how many work
            replaced.add("concurrency")
        if "local" in self.options:  # which says all about local work
            replaced |= {*LOCAL}
        shared = {option: value for option, value in shared.items() if option not in replaced}
        return Trial.of(self.method, task, **(shared | self.options))

    def __repr__(self) -> str:
        return f"Arm({self.name!r})"


def as_arm(given: object) -> Arm:
    """Return the arm that is meant; a method is one without options of its own."""
    if isinstance(given, Arm):
        return given
    if isinstance(given, (str, Strategy, Method)):
        return Arm(given)
    raise InvalidInput(f"a method is a name, a fedhist.Strategy or a fedhist.Arm, got {kind_of(given)}.")


def varied(arms: Sequence[Arm], trials: Sequence[Trial]) -> str:
    """Return the options in which the arms' trials differ, with commas between them: "k,lr"."""
    if not any(arm.options for arm in arms):
        return ""
    described = [trial.described() for trial in trials]
    names = {name for each in described for name in each} - NOT_COMPARED
    first = described[0]
    differ = (name for name in names if any(each.get(name) != first.get(name) for each in described))
    found = {*differ}
    return ",".join(sorted(found | ({"rounds"} if "until" in found else set())))
