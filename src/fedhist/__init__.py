"""K-asynchronous federated learning: FedHist and seven baselines, one simulator.

Names are imported when first used, so that ``fedhist --help`` does not wait for PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Arrivals": "arrivals",
    "Attack": "simulation.attacks",
    "BadUpload": "errors",
    "Comparison": "history",
    "Constant": "simulation.devices",
    "Contrastive": "objectives",
    "CoordinateMedian": "strategies",
    "CrossEntropy": "objectives",
    "DataError": "errors",
    "Defence": "strategies",
    "DivergedError": "errors",
    "DynSGD": "strategies",
    "Explicit": "simulation.devices",
    "Exponential": "simulation.devices",
    "Faults": "simulation.faults",
    "FedAvg": "strategies",
    "FedHist": "strategies",
    "FedHistError": "errors",
    "History": "history",
    "InvalidInput": "errors",
    "Krum": "strategies",
    "LabelFlip": "simulation.attacks",
    "LeNet": "models",
    "LittleIsEnough": "simulation.attacks",
    "LocalSGD": "training",
    "LogNormal": "simulation.devices",
    "Method": "methods",
    "NormClip": "strategies",
    "Pareto": "simulation.devices",
    "Private": "strategies",
    "Proximal": "objectives",
    "REFL": "strategies",
    "Record": "history",
    "Recording": "recording",
    "Replay": "replays",
    "SameValue": "simulation.attacks",
    "ScaledNoise": "simulation.attacks",
    "Schedule": "simulation.clock",
    "SignFlip": "simulation.attacks",
    "SlowGroup": "simulation.devices",
    "SplitNotice": "data",
    "Strategy": "strategies",
    "TWAFL": "strategies",
    "Task": "data",
    "Trial": "simulation.trial",
    "TrimmedMean": "strategies",
    "Uniform": "simulation.devices",
    "WKAFL": "strategies",
    "compare": "simulation.engine",
    "dirichlet": "data",
    "exclusive": "data",
    "iid": "data",
    "load_task": "data",
    "make_schedule": "simulation.clock",
    "random_arrivals": "simulation.devices",
    "read_schedule": "simulation.arrival_log",
    "replay": "replays",
    "shards": "data",
    "simulate": "simulation.engine",
    "simulate_many": "simulation.engine",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedhist' has no attribute {name!r}")
    value = getattr(import_module(f"fedhist.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


if TYPE_CHECKING:
    from fedhist.arrivals import Arrivals
    from fedhist.data import SplitNotice, Task, dirichlet, exclusive, iid, load_task, shards
    from fedhist.errors import BadUpload, DataError, DivergedError, FedHistError, InvalidInput
    from fedhist.history import Comparison, History, Record
    from fedhist.methods import Method
    from fedhist.models import LeNet
    from fedhist.objectives import Contrastive, CrossEntropy, Proximal
    from fedhist.recording import Recording
    from fedhist.replays import Replay, replay
    from fedhist.simulation.arrival_log import read_schedule
    from fedhist.simulation.attacks import Attack, LabelFlip, LittleIsEnough, SameValue, ScaledNoise, SignFlip
    from fedhist.simulation.clock import Schedule, make_schedule
    from fedhist.simulation.devices import (
        Constant,
        Explicit,
        Exponential,
        LogNormal,
        Pareto,
        SlowGroup,
        Uniform,
        random_arrivals,
    )
    from fedhist.simulation.engine import compare, simulate, simulate_many
    from fedhist.simulation.faults import Faults
    from fedhist.simulation.trial import Trial
    from fedhist.strategies import (
        REFL,
        TWAFL,
        WKAFL,
        CoordinateMedian,
        Defence,
        DynSGD,
        FedAvg,
        FedHist,
        Krum,
        NormClip,
        Private,
        Strategy,
        TrimmedMean,
    )
    from fedhist.training import LocalSGD
