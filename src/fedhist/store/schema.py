"""What the JSON in a run's files must look like."""

from collections.abc import Callable
from functools import cache
from typing import Annotated, Self, TypeVar

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from fedhist.errors import brief

T = TypeVar("T")
Text = Annotated[str, Field(max_length=10_000)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Plain = bool | Annotated[int, Field(ge=-(2**63), lt=2**64)] | float | Text | None  # nodes have ids of 64 bits
NUMBERS = ("clients", "bytes_per_upload", "bytes_per_download")
"""Settings that are calculated with."""


def _calculable(setting: dict[str, Plain]) -> dict[str, Plain]:
    for name in setting.keys() & set(NUMBERS):
        value = setting[name]
        if not (isinstance(value, int | float) and 0 <= value <= 2**53):
            raise ValueError(f"{name} must be a number from 0 to 2^53, got {brief(value)}")
    return setting


class Summary(BaseModel):
    """What only the summary has of a run."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    method: Text
    task: Text
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    rounds: Count
    k: Count
    wall_seconds: Annotated[float, Field(ge=0)]
    trained_by: Text = ""
    setting: Annotated[dict[Text, Plain], AfterValidator(_calculable)] = {}
    metrics: Annotated[dict[Annotated[str, Field(max_length=250)], bool], Field(min_length=1)] = {"accuracy": True}


class Event(BaseModel):
    """Something that happened in a run, with any further facts."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")
    __pydantic_extra__: dict[str, Plain | list[Count]]

    time: float
    round: Count
    event: Text

    @model_validator(mode="after")
    def _countable(self) -> Self:
        """Where one entry stands for several events, say how many."""
        for name in ("times", "since"):
            value = (self.__pydantic_extra__ or {}).get(name, 1)
            if type(value) is not int or not 0 <= value < 2**53:
                raise ValueError(f"{name} must be a whole number from 0 to 2^53, got {brief(value)}")
        return self


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
