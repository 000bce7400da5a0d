"""Every setting of a simulation that has a name, for TOML files and the command line alike.

Imports nothing heavy: ``fedhist --help`` is built from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from fedhist.errors import LARGEST, InvalidInput, reason, shown, unknown
from fedhist.store.files import parse_toml, read_text, whole_file

LONGEST, MOST_SEEDS = 1_000_000, 10_000
"""Steps and seeds beyond which a setting is a slip of the hand: the run would neither end nor fit into memory."""


def _in(panel: str, default: Any, description: str, **limits: Any) -> Any:
    return Field(default, description=description, json_schema_extra={"panel": panel}, **limits)


class Settings(BaseModel):
    """What to run, on what, and how."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    strategy: tuple[str, ...] = _in(
        "Method", ("fedhist",), "A method's name, or name:option=value,… (see `fedhist strategies`)."
    )
    defence: str | None = _in(
        "Method", None, "Guards every method: norm-clip, median, trimmed or krum, with options as in trimmed:share=0.2."
    )
    k: int = _in("Method", 10, "Uploads that close a round.")
    rounds: int = _in("Method", 300, "Rounds to run.")
    server_lr: float = _in("Method", 1.0, "The server's learning rate.")
    concurrency: int | None = _in("Method", None, "Clients at work at a time; all by default.")

    dataset: str = _in("Data", "digits", "digits, fashion-mnist, cifar10 or cifar100.")
    data_dir: Path | None = _in("Data", None, "Folder with data sets in torchvision's layout.")
    clients: int = _in("Data", 100, "Number of clients N.")
    split: Literal["dirichlet", "iid", "shards"] = _in(
        "Data", "dirichlet", "How labels are divided: dirichlet, iid or shards."
    )
    beta: float = _in("Data", 0.3, "Dirichlet parameter; the smaller, the more skewed.")
    shards_per_client: int = _in("Data", 2, "Shards each client gets with split = shards.")
    rare_class: int | None = _in("Data", None, "A class that only the slow clients hold.")

    lr: float = _in("Local work", 0.01, "The clients' learning rate.")
    local_steps: int = _in("Local work", 1, "Minibatch steps per upload.", le=LONGEST)
    epochs: int | None = _in(
        "Local work", None, "Passes over a client's data per upload, instead of steps.", le=LONGEST
    )
    batch_size: int = _in("Local work", 32, "Examples per minibatch.")
    momentum: float = _in("Local work", 0.0, "Momentum of local SGD.")
    weight_decay: float = _in("Local work", 0.0, "Weight decay of local SGD.")

    devices: str = _in(
        "Devices",
        "lognormal",
        "How long clients take: constant, uniform, lognormal, exponential, pareto, explicit or random "
        "(K of N at random), with options as in lognormal:sigma=1.",
    )
    slow_fraction: float = _in("Devices", 0.0, "Share of the clients that are slow.", ge=0, le=1)
    slow_speed: float = _in("Devices", 0.5, "The slow clients' share of normal speed.")

    schedule: Path | None = _in(
        "Devices", None, "Who worked from when to when, instead of devices: CSV or JSONL with client, start and end."
    )
    schedule_clients: str = _in(
        "Devices", "auto", "What names a client there: ids, labels, or auto (whole numbers are ids)."
    )

    faults: str | None = _in("Faults", None, "How uploads break on their way, such as nan=0.01,huge=0.02,lost=0.1.")
    bad_updates: str = _in("Faults", "reject", "What to do with a bad upload: reject, clip or stop.")
    max_norm_ratio: float = _in("Faults", 1000.0, "How many times as long as usual an upload may be.")

    clip: float | None = _in("Privacy", None, "Longest upload; with noise_multiplier, differential privacy.")
    noise_multiplier: float | None = _in("Privacy", None, "Noise in multiples of the clip; 0 only clips.")
    noise: Literal["upload", "sum"] = _in("Privacy", "upload", "Where noise is added: upload or sum.")
    delta: float = _in("Privacy", 1e-5, "Delta at which epsilon is told.")
    attack: str | None = _in(
        "Attack",
        None,
        "What some clients do: sign-flip, scaled-noise, same-value, little-is-enough or label-flip, with options as "
        "in sign-flip:share=0.2.",
    )

    seed: int = _in("Run", 0, "Seed of split, schedule, batches and initial model.")
    seeds: int = _in("Run", 1, "Number of seeds, counted from `seed`.", ge=1, le=MOST_SEEDS)
    eval_every: int | None = _in(
        "Run", None, "Rounds between evaluations; by default a twentieth of the rounds, at most 100.", ge=1
    )
    device: str = _in("Run", "auto", "auto (all GPUs, or the CPU), cpu, cuda or a certain GPU such as cuda:1.")
    trainer: str = _in("Run", "auto", "auto, reference, threaded, native or batched.")
    engine: str = _in("Run", "local", "local, or ray to spread the runs over a Ray cluster.")
    checkpoint_every: float = _in(
        "Run", 10.0, "Seconds between checkpoints, from which `fedhist resume` goes on.", ge=0
    )
    record: bool = _in("Run", False, "Keep all uploads, for `fedhist replay`.")
    record_dtype: str | None = _in("Run", None, "float16 or bfloat16 to keep uploads in half the size.")
    target: float = _in("Run", 0.5, "Accuracy whose first round the table reports.", ge=0, le=1)

    @pydantic.field_validator("strategy", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @classmethod
    def read(cls, file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
        """Combine a TOML file with the flags that were given; flags win, None is not given."""
        values: dict[str, Any] = {}
        if file is not None:
            try:
                values = parse_toml(read_text(file))
            except OSError as error:
                raise InvalidInput(f"config={file} cannot be read: {reason(error)}.") from error
            except ValueError as error:
                raise InvalidInput(f"config={file} is not TOML: {reason(error)}.") from error
        values |= {key: value for key, value in (flags or {}).items() if value is not None}
        for key, value in values.items():
            if key not in cls.model_fields:
                raise unknown("setting", key, cls.model_fields)
            if isinstance(value, int) and abs(value) >= LARGEST:
                raise InvalidInput(f"{key}={shown(value)} cannot be used: numbers must be less than 2^63.")
        if "local_steps" in values and values.get("epochs") is not None:
            raise InvalidInput(
                f"epochs={shown(values['epochs'])} and local_steps={shown(values['local_steps'])}: give one of the two."
            )
        try:
            return cls(**values)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            name, why = first["loc"][0], first["msg"][0].lower() + first["msg"][1:]
            raise InvalidInput(f"{name}={shown(first['input'])} cannot be used: {why}.") from error

    def write(self, path: Path) -> None:
        """Write the settings as TOML that :meth:`read` understands."""
        values = self.model_dump(mode="json", exclude_none=True, exclude={"local_steps"} if self.epochs else None)
        with whole_file(path) as part:
            part.write_text(
                "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items()),
                encoding="utf-8",
            )
