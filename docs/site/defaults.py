"""Shows the default of an option that a dataclass declares with ``option(default, …)``, not the declaration."""

from __future__ import annotations

from typing import Any

from griffe import Attribute, ExprCall, Extension


class Defaults(Extension):
    """Replaces declarations of options by their defaults before signatures and tables are made from them."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Read one attribute of a class."""
        if isinstance(attr.value, ExprCall) and str(attr.value.function) in ("option", "part"):
            attr.value = attr.value.arguments[0] if str(attr.value.function) == "option" else "None"
