"""K-asynchronous federated learning: FedHist and seven baselines, one simulator.

Names are imported when first used, so that ``fedhist --help`` does not wait for PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_RENAMED = {"Record": "Evaluation"}
"""Names of 0.1.0's development and what they are called now."""
_HOME = {
    "Arrivals": "strategies.arrivals",
    "Attack": "world.attacks",
    "BadUpload": "errors",
    "Comparison": "store.history",
    "Constant": "world.speeds",
    "Contrastive": "clients.objectives",
    "CoordinateMedian": "strategies",
    "CrossEntropy": "clients.objectives",
    "DataError": "errors",
    "Defence": "strategies",
    "DivergedError": "errors",
    "DynSGD": "strategies",
    "Evaluation": "store.history",
    "Explicit": "world.speeds",
    "Exponential": "world.speeds",
    "Faults": "world.faults",
    "FedAvg": "strategies",
    "FedHist": "strategies",
    "FedHistError": "errors",
    "History": "store.history",
    "InvalidInput": "errors",
    "Krum": "strategies",
    "LabelFlip": "world.attacks",
    "LeNet": "data.models",
    "LittleIsEnough": "world.attacks",
    "LocalSGD": "clients.local",
    "LogNormal": "world.speeds",
    "Method": "simulation.methods",
    "NormClip": "strategies",
    "Pareto": "world.speeds",
    "Private": "strategies",
    "Proximal": "clients.objectives",
    "REFL": "strategies",
    "Recording": "store.recording",
    "Replay": "simulation.replay",
    "SameValue": "world.attacks",
    "ScaledNoise": "world.attacks",
    "Schedule": "world.clock",
    "SignFlip": "world.attacks",
    "SlowGroup": "world.speeds",
    "SplitNotice": "data",
    "Strategy": "strategies",
    "TWAFL": "strategies",
    "Task": "data",
    "Trial": "simulation.trial",
    "TrimmedMean": "strategies",
    "Uniform": "world.speeds",
    "WKAFL": "strategies",
    "compare": "simulation.engine",
    "dirichlet": "data",
    "exclusive": "data",
    "iid": "data",
    "load_task": "data",
    "make_schedule": "world.clock",
    "random_arrivals": "world.speeds",
    "read_schedule": "world.arrival_log",
    "replay": "simulation.replay",
    "shards": "data",
    "simulate": "simulation.engine",
    "simulate_many": "simulation.engine",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        raise AttributeError(f"fedhist.{name} is called fedhist.{_RENAMED[name]} now")
    if name not in _HOME:
        raise AttributeError(f"module 'fedhist' has no attribute {name!r}")
    value = getattr(import_module(f"fedhist.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


if TYPE_CHECKING:
    from fedhist.clients.local import LocalSGD
    from fedhist.clients.objectives import Contrastive, CrossEntropy, Proximal
    from fedhist.data import SplitNotice, Task, dirichlet, exclusive, iid, load_task, shards
    from fedhist.data.models import LeNet
    from fedhist.errors import BadUpload, DataError, DivergedError, FedHistError, InvalidInput
    from fedhist.simulation.engine import compare, simulate, simulate_many
    from fedhist.simulation.methods import Method
    from fedhist.simulation.replay import Replay, replay
    from fedhist.simulation.trial import Trial
    from fedhist.store.history import Comparison, Evaluation, History
    from fedhist.store.recording import Recording
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
    from fedhist.strategies.arrivals import Arrivals
    from fedhist.world.arrival_log import read_schedule
    from fedhist.world.attacks import Attack, LabelFlip, LittleIsEnough, SameValue, ScaledNoise, SignFlip
    from fedhist.world.clock import Schedule, make_schedule
    from fedhist.world.faults import Faults
    from fedhist.world.speeds import (
        Constant,
        Explicit,
        Exponential,
        LogNormal,
        Pareto,
        SlowGroup,
        Uniform,
        random_arrivals,
    )
