"""Every setting of ``fedhist run`` and ``fedhist compare``: a trial's options and a few more, as flags and in TOML.

Imports nothing heavy: ``fedhist --help`` is built from it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedhist.errors import InvalidInput, brief, flag, number, reason, require, whole
from fedhist.options import Option, option, options_of, unknown_option
from fedhist.simulation.trial import INSTEAD, Trial
from fedhist.store.files import MOST_TOML, as_toml, parse_toml, read_text, whole_file

SAME_FOR_ALL = frozenset(("seed", "record_dtype", "target"))
"""Options of a trial that all arms of a comparison have in common."""


@dataclass(frozen=True)
class Experiment:
    """The settings that are not options of a trial, or have another form there."""

    strategy: str = option(
        "fedhist",
        "A method's name (see `fedhist strategies`) or package.module:Class of yours; :option=value,… follows.",
        "Method",
    )
    arm: str | None = option(
        None,
        "A method with options of its own, as in 'fedavg lr=0.1 k=20 name=large'; the other settings are for all arms.",
        "Method",
    )
    defence: str | None = option(
        None, "Guards every method: norm-clip, median, trimmed or krum, with options as in trimmed:share=0.2.", "Method"
    )
    dataset: str = option("digits", "digits, fashion-mnist, cifar10, cifar100, shakespeare or watch.", "Data")
    data_dir: Path | None = option(
        None,
        "Folder with data sets in torchvision's layout.",
        "Data",
        default_text="$FEDHIST_DATA, or ~/.cache/fedhist and ./data",
    )
    model: str | None = option(
        None,
        "lenet, cnn, resnet8, resnet18, mlp, char-lstm, char-transformer, or package.module:function.",
        "Data",
        default_text="what suits the data set",
    )
    clients: int = option(100, "Number of clients N; those with the most data of shakespeare, all 20 of watch.", "Data")
    split: str = option("dirichlet", "How labels are divided: dirichlet, iid or shards.", "Data")
    beta: float = option(0.3, "Dirichlet parameter; the smaller, the more skewed.", "Data")
    shards_per_client: int = option(2, "Shards each client gets with split = shards.", "Data")
    rare_class: int | None = option(None, "A class that only the slow clients hold.", "Data")
    client_test: float | None = option(
        None, "Share of each client's examples to test on: metrics client by client.", "Data"
    )
    slow_fraction: float = option(0.0, "Share of the clients that are slow.", "World")
    slow_speed: float = option(0.5, "The slow clients' share of normal speed.", "World")
    clip: float | None = option(None, "Upload norm cap; noise_multiplier adds differential privacy.", "Privacy")
    noise_multiplier: float | None = option(None, "Noise in multiples of the clip; 0 only clips.", "Privacy")
    noise: str = option("upload", "Where noise is added: upload, sum or client.", "Privacy")
    delta: float = option(1e-5, "Delta at which epsilon is reported.", "Privacy")
    seeds: int = option(1, "Number of seeds, counted from `seed`.", "Run")
    record: bool = option(False, "Keep all uploads, for `fedhist replay`.", "Run")
    device: str = option("auto", "auto (all GPUs, or the CPU), cpu, cuda or a certain GPU such as cuda:1.", "Run")
    trainer: str = option("auto", "auto, reference, threaded, native or batched.", "Run")
    engine: str = option("local", "local, or ray to spread the runs over a Ray cluster.", "Run")
    gpu_share: float = option(1.0, "With ray, the share of a GPU that a piece of work takes.", "Run")
    checkpoint_every: float = option(10.0, "Seconds between checkpoints, from which `fedhist resume` continues.", "Run")


def trial_options() -> dict[str, Option]:
    """Return the settings that are passed on to a trial, by their names."""
    own = options_of(Experiment)
    return {name: each for name, each in options_of(Trial).items() if name not in own}


def all_options() -> dict[str, Option]:
    """Return every setting by its name."""
    return options_of(Experiment) | trial_options()


def arm_options() -> dict[str, Option]:
    """Return the options that an arm may have of its own, by their names."""
    return {name: each for name, each in trial_options().items() if name not in SAME_FOR_ALL}


class Settings(dict[str, Any]):
    """The values of all settings: those that were given, and defaults for the others.

    `strategy` is a list of names, and `arm` one of tables: `strategy`, perhaps `name`, and options.
    """

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        options = all_options()
        self.given: dict[str, Any] = {}
        for name, value in (given or {}).items():
            if name not in options:
                raise unknown_option("fedhist", name, options)
            self.given[name] = _checked(options[name], value)
        defaults = {name: None if each.default_text else each.default for name, each in options.items()}
        alone = [] if self.given.get("arm") else [defaults["strategy"]]
        super().__init__(defaults | {"strategy": alone, "arm": []} | self.given)
        _one_of_two(self.given)

    def having(self, **values: Any) -> Settings:
        """Return these settings with some others."""
        return Settings(self.given | values)

    def for_trial(self) -> dict[str, Any]:
        """Return the options of a trial that were given, as :class:`Trial` takes them."""
        values: dict[str, Any] = {}
        for name, each in trial_options().items():
            if name in self.given:
                owner = values if each.part is None else values.setdefault(each.part, {})
                owner[each.field] = self.given[name]
        parts = {field.name: field.metadata["part"] for field in fields(Trial) if "part" in field.metadata}
        return values | {name: kind(**values[name]) for name, kind in parts.items() if name in values}

    def require_one(self) -> None:
        """Raise unless these are the settings of a single run."""
        strategy, seeds = self["strategy"], self["seeds"]
        require(not self["arm"], "run takes one strategy and no arms; use fedhist compare.")
        require(
            len(strategy) == 1 and "all" not in strategy and seeds == 1,
            f"run takes one strategy and one seed, got strategy={brief(strategy)} and seeds={seeds}; "
            "use fedhist compare.",
        )

    @classmethod
    def read(cls, file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
        """Combine a TOML file with the flags that were given; flags win, and None is a flag that was not given."""
        values: dict[str, Any] = {}
        if file is not None:
            try:
                values = parse_toml(read_text(file, MOST_TOML))
            except OSError as error:
                raise InvalidInput(f"config={file} cannot be read: {reason(error)}.") from error
            except ValueError as error:
                raise InvalidInput(f"config={file} is not TOML: {reason(error)}.") from error
        flags = {name: value for name, value in (flags or {}).items() if value is not None}
        for pair in INSTEAD:
            for one, other in (pair, pair[::-1]):
                if one in flags and other not in flags:
                    values.pop(other, None)
        return cls(values | flags)

    def write(self, path: Path) -> None:
        """Write all settings as TOML that :meth:`read` understands."""
        values = dict(self)
        if values["epochs"] is not None:
            del values["local_steps"]
        arms = values.pop("arm")
        if arms and not values["strategy"]:
            del values["strategy"]
        parts = [as_toml(values), *(f"\n[[arm]]\n{as_toml(arm)}" for arm in arms)]
        with whole_file(path) as part:
            part.write_text("".join(parts), encoding="utf-8")


def parse_arm(text: str) -> dict[str, Any]:
    """Return the arm that a string such as ``refl + adam lr=0.1 name="large steps"`` means, as files have arms.

    The text is divided like a command in a shell. What comes before the first ``option=value`` is the strategy.
    """
    form = "write the strategy and then options, as in 'fedavg lr=0.1 name=\"large steps\"'"
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidInput(f"arm={brief(text)} cannot be read: {reason(error).lower()}; {form}.") from None
    pairs = [re.fullmatch(r"([A-Za-z_][\w-]*)=(.*)", word, flags=re.DOTALL) for word in words]
    first = next((place for place, pair in enumerate(pairs) if pair), len(words))
    known = arm_options()
    arm: dict[str, Any] = {"strategy": " ".join(words[:first])}
    for word, pair in zip(words[first:], pairs[first:], strict=True):
        if pair is None:
            raise InvalidInput(f"arm={brief(text)} has {brief(word)} after its options; {form}.")
        name, value = pair[1].replace("-", "_"), pair[2]
        require(name not in arm, f"arm={brief(text)} gives {name} twice.")
        arm[name] = _read_value(known[name].kind, value) if name in known else value
    return arm


def _read_value(kind: type, text: str) -> Any:
    """Return what a text means as a value of an option; the text itself if it is nothing of the kind."""
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        return text


def _checked_arms(given: Any) -> list[dict[str, Any]]:
    """Return arms as tables with values in the types of their options, or raise."""
    each_fits = isinstance(given, (list, tuple)) and all(isinstance(arm, (str, dict)) for arm in given)
    require(each_fits, f"arm must be a list of tables, written [[arm]] in a file, got {brief(given)}.")
    known, everything, arms = arm_options(), all_options(), []
    for number_, one in enumerate(given, 1):
        arm = parse_arm(one) if isinstance(one, str) else one
        strategy, title = arm.get("strategy"), arm.get("name")
        fits = isinstance(strategy, str) and bool(strategy.strip())
        require(fits, f'arm {number_} needs a strategy, as in strategy = "fedavg", got {brief(strategy)}.')
        require(strategy != "all", f"arm {number_} has the strategy 'all'; an arm is one method.")
        label = f"arm {number_} ({brief(title if isinstance(title, str) else strategy)})"
        checked = {}
        for name, value in arm.items():
            if name not in known and name in everything and name != "strategy":
                raise InvalidInput(
                    f"{label} cannot have {name}, which is the same for all arms; set it outside of them."
                )
            if name not in known and name not in ("strategy", "name"):
                raise unknown_option("an arm", name, [*known, "name"])
            try:
                checked[name] = _checked(known[name], value) if name in known else _text(name, value)
            except InvalidInput as error:
                raise InvalidInput(f"{label}: {error}") from None
        require(bool(checked.get("name", "a").strip()), f"arm {number_} must have a name that is not empty, or none.")
        try:
            _one_of_two(checked)
        except InvalidInput as error:
            raise InvalidInput(f"{label}: {error}") from None
        arms.append(checked)
    return arms


def _one_of_two(given: Mapping[str, Any]) -> None:
    """Raise if two settings are given of which one takes the place of the other."""
    if {"epochs", "local_steps"} <= given.keys():
        both = f"epochs={brief(given['epochs'])} and local_steps={brief(given['local_steps'])}"
        raise InvalidInput(f"{both}: give one of the two.")


def _text(name: str, value: Any) -> str:
    """Return a value that must be a string that files can hold."""
    require(isinstance(value, (str, Path)), f"{name} must be a string, got {brief(value)}.")
    try:
        str(value).encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{name} must be a string in UTF-8, got {brief(str(value))}.") from None
    return str(value)


def _checked(each: Option, value: Any) -> Any:
    """Return a value in the type of its option, or raise."""
    if each.name == "arm":
        return _checked_arms(value)
    if each.name == "strategy":
        names = [value] if isinstance(value, str) else value
        fits = isinstance(names, (list, tuple)) and len(names) > 0 and all(isinstance(name, str) for name in names)
        require(fits, f"strategy must be a name or a list of names, got {brief(value)}.")
        return list(names)
    checks: Mapping[type, Callable[[str, object], Any]] = {bool: flag, int: whole, float: number}
    if each.kind in checks:
        return checks[each.kind](each.name, value)
    return each.kind(_text(each.name, value))
