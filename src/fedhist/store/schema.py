"""What the JSON in a run's files must look like."""

from collections.abc import Callable
from functools import cache
from typing import Annotated, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from fedhist.errors import brief

T = TypeVar("T")
Plain = bool | int | float | str | None


class Summary(BaseModel):
    """What only the summary has of a run."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    method: str
    task: str
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    rounds: int
    k: int
    wall_seconds: Annotated[float, Field(ge=0)]
    setting: dict[str, Plain] = {}


class Event(BaseModel):
    """Something that happened in a run, with any further facts."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")
    __pydantic_extra__: dict[str, Plain | list[int]]

    time: float
    round: Annotated[int, Field(ge=0)]
    event: str


@cache
def reader(kind: type[T]) -> Callable[[str], T]:
    """Return a function that reads JSON of a kind, or raises a ValueError with one sentence."""
    adapter = TypeAdapter(kind)

    def read(text: str) -> T:
        try:
            return adapter.validate_json(text)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = f"{brief('.'.join(map(str, first['loc'])))}: " if first["loc"] else ""
            raise ValueError(f"{where}{first['msg'][0].lower()}{first['msg'][1:]}") from None

    return read
