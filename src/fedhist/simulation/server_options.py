"""What every server is told, simulated or deployed. Imports nothing heavy, as `trial.py` does not."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhist.errors import as_path, decay, rate, require, whole
from fedhist.options import documented, option

if TYPE_CHECKING:
    from fedhist.simulation.methods import Method
    from fedhist.strategies import Strategy

STRATEGY = 'A strategy, which is copied and not changed, or a name with options: "fedhist:ina=false", "refl + adam".'


@documented
@dataclass(frozen=True, eq=False, kw_only=True)
class ServerOptions:
    """Options of every server, simulated or deployed."""

    strategy: Strategy | str | Method = dataclasses.field(kw_only=False, metadata={"help": STRATEGY})
    k: int = option(
        None,
        "Uploads that close a round, from 1 (fully asynchronous) to N (synchronous).",
        "Method",
        default_text="10",
    )
    server_lr: float = option(1.0, "The server's learning rate, η in Eq. 4.", "Method")
    ema: float | None = option(
        None,
        "Evaluate, and keep as the result, an exponential moving average of the model with this decay, such as 0.99; "
        "clients never see it.",
        "Method",
    )
    bad_updates: str = option(
        "reject",
        "What to do with an upload that holds NaN, is absurdly long or is not what was asked for: reject it, clip it "
        "if only its length is wrong, stop, or accept it (simulation only; may diverge).",
        "Faults",
    )
    max_norm_ratio: float = option(
        30.0,
        "How many times as long as usual an upload may be; usual is what most clients have sent so far.",
        "Faults",
    )
    record: Path | None = option(None, "Keep all uploads in this folder, for `fedhist replay`.", "Run", compared=False)
    record_dtype: str | None = option(
        None, "float32, float16 or bfloat16; the latter keep uploads in half the size.", "Run", compared=False
    )

    method: Method = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        from fedhist.simulation.methods import as_method  # noqa: PLC0415
        from fedhist.store.recording import check_dtype  # noqa: PLC0415
        from fedhist.strategies.screening import Screen  # noqa: PLC0415

        self._set(k=whole("k", self._uploads(), 1))
        rate("server_lr", self.server_lr)
        if self.ema is not None:
            decay("ema", self.ema)
        Screen(self.bad_updates, self.max_norm_ratio)
        check_dtype(self.record_dtype)
        method = as_method(self.strategy, getattr(self, "objective", None))
        hidden = self.record is not None and any(
            getattr(each, "noise", None) == "sum" for each in method.strategy.modules()
        )
        require(not hidden, "record keeps every upload, which noise='sum' does not protect; use noise='upload'.")
        self._set(method=method, record=None if self.record is None else as_path("record", self.record))

    def _uploads(self) -> int:
        """Return how many uploads a round has at most."""
        return 10 if self.k is None else self.k

    def _set(self, **values: Any) -> None:
        """Set fields of this frozen object while it is being made."""
        for name, value in values.items():
            object.__setattr__(self, name, value)
