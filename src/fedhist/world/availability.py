"""To be replaced."""

from typing import Any


class Availability:
    """To be replaced."""

    interrupted: str = "abandon"
    gives_up: float = 0.0
    stretches: Any
    times: Any
    reordered: Any


def as_availability(given: Any) -> Availability | None:
    """To be replaced."""
    return given
