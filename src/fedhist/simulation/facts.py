"""What the plain values in a checkpoint must look like; apart, since no simulation without one needs pydantic."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fedhist.store.history import Evaluation
from fedhist.store.schema import Count, Event, Text

Amount = Annotated[float, Field(ge=0)]
CONFIG = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")


class Screened(BaseModel):
    """What :meth:`Screen.state` returns."""

    model_config = CONFIG

    usual: Amount
    clients: Count
    alarmed: bool
    recent: list[tuple[Count, Amount]]


class Facts(BaseModel):
    """What :meth:`Server.state` returns of a run besides tensors, and whether the rest is carried out elsewhere."""

    model_config = CONFIG

    id: Text | None = None
    round: Count
    evaluations: list[Evaluation]
    events: list[Event]
    diverged: Text | None
    screen: Screened
    left: bool


class Stored(BaseModel):
    """All that a file has of its runs besides tensors."""

    model_config = CONFIG

    kind: Text
    round: Count
    wall_seconds: Amount
    members: Annotated[list[tuple[Count, Count]], Field(min_length=1)]
    facts: list[Facts]
    described: list[dict[str, Any]]
    numerics: list[dict[str, Text]]
