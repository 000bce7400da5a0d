"""Asynchronous federated learning: simulate it, compare methods on the same arrivals, deploy with Flower.

The public names are those that ``__init__.pyi`` imports. They are imported when first used, so that
``fedhist --help`` does not wait for PyTorch.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.2.0"

_STUB = ast.parse(Path(__file__).with_name("__init__.pyi").read_text(encoding="utf-8"))
_HOMES = {name.name: str(node.module) for node in _STUB.body if isinstance(node, ast.ImportFrom) for name in node.names}
_RENAMED = {"Record": "Evaluation"}
"""Names of 0.1.0's development and what they are called now."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        raise AttributeError(f"fedhist.{name} is called fedhist.{_RENAMED[name]} now")
    if name not in _HOMES:
        raise AttributeError(f"module 'fedhist' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, for completion: not the modules and helpers that they happen to need."""
    return sorted([*(name for name in globals() if name.startswith("__")), *__all__])
