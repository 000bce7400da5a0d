"""How K uploads become one global update: one paper, one file."""

from fedhist.strategies.base import Strategy
from fedhist.strategies.dynsgd import DynSGD
from fedhist.strategies.fedavg import FedAvg
from fedhist.strategies.fedhist import FedHist
from fedhist.strategies.private import Private
from fedhist.strategies.refl import REFL
from fedhist.strategies.robust import CoordinateMedian, Defence, Krum, NormClip, TrimmedMean
from fedhist.strategies.scaffold import Scaffold
from fedhist.strategies.twafl import TWAFL
from fedhist.strategies.wkafl import WKAFL

__all__ = [
    "REFL",
    "TWAFL",
    "WKAFL",
    "CoordinateMedian",
    "Defence",
    "DynSGD",
    "FedAvg",
    "FedHist",
    "Krum",
    "NormClip",
    "Private",
    "Scaffold",
    "Strategy",
    "TrimmedMean",
]
