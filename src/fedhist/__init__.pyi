# The public names: __init__.py reads them from here, and so do type checkers.
from fedhist.clients.local import Local as Local, LocalSGD as LocalSGD
from fedhist.clients.objectives import Contrastive as Contrastive, CrossEntropy as CrossEntropy, Proximal as Proximal
from fedhist.data.datasets import load_task as load_task
from fedhist.data.models import LeNet as LeNet, to_group_norm as to_group_norm
from fedhist.data.partition import (
    SplitNotice as SplitNotice,
    dirichlet as dirichlet,
    exclusive as exclusive,
    iid as iid,
    shards as shards,
)
from fedhist.data.task import Task as Task
from fedhist.errors import (
    BadUpload as BadUpload,
    DataError as DataError,
    DivergedError as DivergedError,
    FedHistError as FedHistError,
    InvalidInput as InvalidInput,
)
from fedhist.report.tuned import Tuned as Tuned, tune as tune
from fedhist.simulation.arms import Arm as Arm
from fedhist.simulation.engine import compare as compare, simulate as simulate, simulate_many as simulate_many
from fedhist.simulation.methods import Method as Method
from fedhist.simulation.replay import Replay as Replay, replay as replay
from fedhist.simulation.trial import Trial as Trial
from fedhist.store.comparison import Comparison as Comparison
from fedhist.store.history import Evaluation as Evaluation, History as History
from fedhist.store.recording import Recording as Recording
from fedhist.strategies import (
    ACED as ACED,
    AREA as AREA,
    CA2FL as CA2FL,
    FADAS as FADAS,
    MIFA as MIFA,
    REFL as REFL,
    TWAFL as TWAFL,
    WKAFL as WKAFL,
    AsyncFedED as AsyncFedED,
    CoordinateMedian as CoordinateMedian,
    Defence as Defence,
    DelayAdaptive as DelayAdaptive,
    DynSGD as DynSGD,
    FedAdagrad as FedAdagrad,
    FedAdam as FedAdam,
    FedAsync as FedAsync,
    FedAvg as FedAvg,
    FedBuff as FedBuff,
    FedFa as FedFa,
    FedHist as FedHist,
    FedStale as FedStale,
    FedYogi as FedYogi,
    Krum as Krum,
    MomentumApproximation as MomentumApproximation,
    NormClip as NormClip,
    Nowcast as Nowcast,
    Port as Port,
    Private as Private,
    Scaffold as Scaffold,
    ServerMomentum as ServerMomentum,
    Strategy as Strategy,
    TrimmedMean as TrimmedMean,
)
from fedhist.strategies.arrivals import Arrivals as Arrivals
from fedhist.world.arrival_log import read_schedule as read_schedule
from fedhist.world.attacks import (
    Attack as Attack,
    LabelFlip as LabelFlip,
    LittleIsEnough as LittleIsEnough,
    SameValue as SameValue,
    ScaledNoise as ScaledNoise,
    SignFlip as SignFlip,
)
from fedhist.world.availability import Always as Always, AvailabilityTrace as AvailabilityTrace, DayNight as DayNight
from fedhist.world.clocks import make_schedule as make_schedule
from fedhist.world.closing import (
    Arrival as Arrival,
    Closing as Closing,
    Deadline as Deadline,
    FirstK as FirstK,
    Synchronous as Synchronous,
)
from fedhist.world.coupling import Coupling as Coupling
from fedhist.world.devices import DeviceTable as DeviceTable
from fedhist.world.faults import Faults as Faults
from fedhist.world.network import Network as Network
from fedhist.world.schedule import Schedule as Schedule
from fedhist.world.speeds import (
    Constant as Constant,
    Explicit as Explicit,
    Exponential as Exponential,
    HalfNormal as HalfNormal,
    LogNormal as LogNormal,
    Mixture as Mixture,
    Pareto as Pareto,
    SlowGroup as SlowGroup,
    Tiers as Tiers,
    Uniform as Uniform,
    random_arrivals as random_arrivals,
)

__version__: str
__all__: list[str]
