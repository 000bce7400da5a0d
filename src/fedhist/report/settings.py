"""The settings of runs as a reader wants them: few, short, and explained."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedhist.options import options_of
from fedhist.report.gather import Group, text_of
from fedhist.simulation.trial import Trial

OPTIONS = options_of(Trial)
MEANINGS = {
    "task": "Data and model.",
    "dataset": "Where the data come from.",
    "clients": "Number of clients N.",
    "split": "How labels are divided among the clients.",
    "beta": "Dirichlet parameter; the smaller, the more skewed.",
    "rare_class": "A class that only some clients hold.",
    "rare_clients": "How many clients hold it.",
    "parameters": "Trainable numbers in the model.",
    "bytes_per_upload": "Size of one model on the way up or down.",
    "folder": "Where these runs are.",
    "varied": "Options that the methods do not share; the table of methods has them.",
    "metrics": "What is measured, the primary metric first; ↑ where more is better, ↓ where less is.",
    "data": "Checksum of the data and of which client holds what.",
    **{name: each.help for name, each in OPTIONS.items()},
}
SHORT = {
    "clients": "N",
    "k": "K",
    "beta": "β",
    "local_steps": "steps",
    "batch_size": "batch",
    "server_lr": "server lr",
    "weight_decay": "decay",
    "lr_schedule": "schedule of lr",
    "max_norm_ratio": "norm limit",
    "bad_updates": "bad uploads",
    "schedule_clients": "client schedule",
    "bytes_per_upload": "bytes up",
    "bytes_per_download": "bytes down",
    "rare_class": "rare class",
    "concurrency": "at work",
}
"""Short names; others are their own, without underscores."""
TELLING = ("clients", "k", "rounds", "until", "split", "beta", "lr", "local_steps", "batch_size", "speeds")
"""Settings that every reader asks for, whatever their values."""


class Setting(NamedTuple):
    """One setting as the page writes it."""

    name: str
    value: str
    meaning: str


def short_name(name: str) -> str:
    """Return how the page calls an option."""
    return SHORT.get(name, name.replace("_", " "))


def described(setting: Mapping[str, Any]) -> list[Setting]:
    """Return settings as the page writes them."""
    return [Setting(short_name(name), text_of(value), MEANINGS.get(name, name)) for name, value in setting.items()]


def folded(group: Group, common: Mapping[str, Any]) -> tuple[list[Setting], list[Setting]]:
    """Return the settings of a group to show and those to fold away.

    Shown is what sets the group apart from others on the page, what is not by default, and, where there are no others,
    what every reader asks for.
    """
    own = {name: value for name, value in group.setting.items() if name != "task"}
    alone = common == group.setting
    shown = [name for name in own if (_telling(name, own[name]) if alone else name not in common)]
    shown.sort(key=lambda name: TELLING.index(name) if name in TELLING else len(TELLING))
    return described({name: own[name] for name in shown}), described(
        {name: value for name, value in own.items() if name not in shown}
    )


def _telling(name: str, value: object) -> bool:
    changed = name in OPTIONS and text_of(value) != text_of(OPTIONS[name].default) and OPTIONS[name].default is not None
    given = name in OPTIONS and OPTIONS[name].default is None
    return name in TELLING or changed or given
