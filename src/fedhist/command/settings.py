"""Every setting of ``fedhist run`` and ``fedhist compare``: a trial's options and a few more, as flags and in TOML.

Imports nothing heavy: ``fedhist --help`` is built from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedhist.errors import InvalidInput, brief, flag, number, reason, require, whole
from fedhist.options import Option, option, options_of, unknown_option
from fedhist.simulation.trial import Trial
from fedhist.store.files import MOST_TOML, parse_toml, read_text, whole_file


@dataclass(frozen=True)
class Experiment:
    """The settings that are not options of a trial, or have another form there."""

    strategy: str = option("fedhist", "A method's name, or name:option=value,… (see `fedhist strategies`).", "Method")
    defence: str | None = option(
        None, "Guards every method: norm-clip, median, trimmed or krum, with options as in trimmed:share=0.2.", "Method"
    )
    dataset: str = option("digits", "digits, fashion-mnist, cifar10, cifar100, shakespeare or watch.", "Data")
    data_dir: Path | None = option(None, "Folder with data sets in torchvision's layout.", "Data")
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
    slow_fraction: float = option(0.0, "Share of the clients that are slow.", "Speeds")
    slow_speed: float = option(0.5, "The slow clients' share of normal speed.", "Speeds")
    clip: float | None = option(None, "Longest upload; with noise_multiplier, differential privacy.", "Privacy")
    noise_multiplier: float | None = option(None, "Noise in multiples of the clip; 0 only clips.", "Privacy")
    noise: str = option("upload", "Where noise is added: upload, sum or client.", "Privacy")
    delta: float = option(1e-5, "Delta at which epsilon is reported.", "Privacy")
    seeds: int = option(1, "Number of seeds, counted from `seed`.", "Run")
    record: bool = option(False, "Keep all uploads, for `fedhist replay`.", "Run")
    device: str = option("auto", "auto (all GPUs, or the CPU), cpu, cuda or a certain GPU such as cuda:1.", "Run")
    trainer: str = option("auto", "auto, reference, threaded, native or batched.", "Run")
    engine: str = option("local", "local, or ray to spread the runs over a Ray cluster.", "Run")
    checkpoint_every: float = option(10.0, "Seconds between checkpoints, from which `fedhist resume` continues.", "Run")


def trial_options() -> dict[str, Option]:
    """Return the settings that are passed on to a trial, by their names."""
    own = options_of(Experiment)
    return {name: each for name, each in options_of(Trial).items() if name not in own}


def all_options() -> dict[str, Option]:
    """Return every setting by its name."""
    return options_of(Experiment) | trial_options()


class Settings(dict[str, Any]):
    """The values of all settings: those that were given, and defaults for the others."""

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        options = all_options()
        self.given: dict[str, Any] = {}
        for name, value in (given or {}).items():
            if name not in options:
                raise unknown_option("fedhist", name, options)
            self.given[name] = _checked(options[name], value)
        defaults = {name: None if each.default_text else each.default for name, each in options.items()}
        super().__init__(defaults | {"strategy": [defaults["strategy"]]} | self.given)
        if {"epochs", "local_steps"} <= self.given.keys():
            both = f"epochs={brief(self['epochs'])} and local_steps={brief(self['local_steps'])}"
            raise InvalidInput(f"{both}: give one of the two.")

    def having(self, **values: Any) -> Settings:
        """Return these settings with some others."""
        made = Settings(values)
        made.given = self.given | made.given
        made.update(made.given)
        return made

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
        for one, other in (("epochs", "local_steps"), ("local_steps", "epochs")):
            if one in flags and other not in flags:
                values.pop(other, None)
        return cls(values | flags)

    def write(self, path: Path) -> None:
        """Write all settings as TOML that :meth:`read` understands."""
        values = {name: str(value) if isinstance(value, Path) else value for name, value in self.items()}
        if values["epochs"] is not None:
            del values["local_steps"]
        texts = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items() if value is not None}
        lines = [f"{name} = {text}\n".replace("\x7f", "\\u007f") for name, text in texts.items()]
        with whole_file(path) as part:
            part.write_text("".join(lines), encoding="utf-8")


def _checked(each: Option, value: Any) -> Any:
    """Return a value in the type of its option, or raise."""
    if each.name == "strategy":
        names = [value] if isinstance(value, str) else value
        fits = isinstance(names, (list, tuple)) and len(names) > 0 and all(isinstance(name, str) for name in names)
        require(fits, f"strategy must be a name or a list of names, got {brief(value)}.")
        return list(names)
    checks: Mapping[type, Callable[[str, object], Any]] = {bool: flag, int: whole, float: number}
    if each.kind in checks:
        return checks[each.kind](each.name, value)
    require(isinstance(value, (str, Path)), f"{each.name} must be a text, got {brief(value)}.")
    try:
        str(value).encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{each.name} must be a text in UTF-8, got {brief(str(value))}.") from None
    return each.kind(value)
