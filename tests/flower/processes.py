"""The helpers that examples/flower has for processes on loopback, for tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"


def load_local() -> ModuleType:
    """Return examples/flower/local.py as a module."""
    spec = importlib.util.spec_from_file_location("flower_local", EXAMPLE / "local.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["flower_local"] = module
    spec.loader.exec_module(module)
    return module
