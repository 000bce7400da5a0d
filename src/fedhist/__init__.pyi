# The public names: __init__.py reads them from here, and so do type checkers.
from fedhist.clients.local import LocalSGD
from fedhist.clients.objectives import Contrastive, CrossEntropy, Proximal
from fedhist.data.datasets import load_task
from fedhist.data.models import LeNet
from fedhist.data.partition import SplitNotice, dirichlet, exclusive, iid, shards
from fedhist.data.task import Task
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
from fedhist.world.speeds import Constant, Explicit, Exponential, LogNormal, Pareto, SlowGroup, Uniform, random_arrivals

__version__: str
__all__: list[str]
