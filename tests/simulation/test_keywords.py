from __future__ import annotations

import inspect
from typing import Any

import pytest

import fedhist as fh
from fedhist.simulation.keywords import ArmOptions, ComparisonOptions, RunOptions

OWN = {"strategy", "task", "name", "methods", "seeds"}


@pytest.mark.parametrize(
    ("function", "options", "also"),
    [(fh.simulate, RunOptions, set()), (fh.compare, ComparisonOptions, {"record"}), (fh.Arm, ArmOptions, set())],
)
def test_editors_are_told_the_options_that_there_are(function: Any, options: Any, also: set[str]) -> None:
    names = {*inspect.signature(function).parameters} - OWN - also
    assert names == options.__optional_keys__ and not options.__required_keys__


def test_arms_list_their_options() -> None:
    assert "lr_schedule" in inspect.signature(fh.Arm).parameters and "seed" not in inspect.signature(fh.Arm).parameters
    with pytest.raises(fh.InvalidInput, match="unknown option of Arm\\(\\) 'rate': "):
        fh.Arm("fedavg", rate=0.1)  # type: ignore[call-arg]
