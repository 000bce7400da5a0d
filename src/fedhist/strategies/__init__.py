"""How K uploads become one global update: rules, and what goes around them."""

from fedhist.strategies.base import Strategy
from fedhist.strategies.fedopt import FedAdagrad, FedAdam, FedYogi, ServerMomentum
from fedhist.strategies.private import Private
from fedhist.strategies.robust import CoordinateMedian, Defence, Krum, NormClip, TrimmedMean
from fedhist.strategies.rules.aced import ACED
from fedhist.strategies.rules.area import AREA
from fedhist.strategies.rules.asyncfeded import AsyncFedED
from fedhist.strategies.rules.ca2fl import CA2FL
from fedhist.strategies.rules.delay_adaptive import DelayAdaptive
from fedhist.strategies.rules.dynsgd import DynSGD
from fedhist.strategies.rules.fadas import FADAS
from fedhist.strategies.rules.fedasync import FedAsync
from fedhist.strategies.rules.fedavg import FedAvg
from fedhist.strategies.rules.fedbuff import FedBuff
from fedhist.strategies.rules.fedfa import FedFa
from fedhist.strategies.rules.fedhist import FedHist
from fedhist.strategies.rules.fedstale import FedStale
from fedhist.strategies.rules.mifa import MIFA
from fedhist.strategies.rules.momentum_approximation import MomentumApproximation
from fedhist.strategies.rules.nowcast import Nowcast
from fedhist.strategies.rules.port import Port
from fedhist.strategies.rules.refl import REFL
from fedhist.strategies.rules.scaffold import Scaffold
from fedhist.strategies.rules.twafl import TWAFL
from fedhist.strategies.rules.wkafl import WKAFL

__all__ = [
    "ACED",
    "AREA",
    "CA2FL",
    "FADAS",
    "MIFA",
    "REFL",
    "TWAFL",
    "WKAFL",
    "AsyncFedED",
    "CoordinateMedian",
    "Defence",
    "DelayAdaptive",
    "DynSGD",
    "FedAdagrad",
    "FedAdam",
    "FedAsync",
    "FedAvg",
    "FedBuff",
    "FedFa",
    "FedHist",
    "FedStale",
    "FedYogi",
    "Krum",
    "MomentumApproximation",
    "NormClip",
    "Nowcast",
    "Port",
    "Private",
    "Scaffold",
    "ServerMomentum",
    "Strategy",
    "TrimmedMean",
]
