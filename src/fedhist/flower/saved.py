"""A K-async server's state in its checkpoint's folder: written round by round, resumed, and read when it is dead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Result
from torch import Tensor

from fedhist.errors import FedHistError, reason
from fedhist.flower.exchange import DELTA
from fedhist.flower.options import Options
from fedhist.flower.source import Network
from fedhist.flower.wire import Wire
from fedhist.options import options_of, values_of
from fedhist.simulation.checkpoint import NOT_DESCRIBED
from fedhist.simulation.server import Server
from fedhist.simulation.server_options import ServerOptions
from fedhist.store.deployed import CHECKPOINT, GROWING, KINDS, METRICS, State
from fedhist.store.history import MOST_CLIENTS
from fedhist.store.journal import STEP, Journal
from fedhist.strategies import Private, Strategy
from fedhist.strategies.memory import touched_rows

BYTES = "bytes"


def privates(strategy: Strategy) -> list[Private]:
    """Return the parts of a strategy that account for privacy, the outermost first."""
    return [part for part in strategy.modules() if isinstance(part, Private)]


class Saved:
    """The checkpoint of a session."""

    def __init__(self, folder: Path, options: Options, wire: Wire) -> None:
        self.folder, self._options, self._wire = folder, options, wire
        self._journal = Journal(folder / CHECKPOINT, KINDS[0], GROWING)
        self.round = 0
        """The last round that is known to be on the disk."""
        self._begun = 0

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise unless a run that was saved can be resumed as this one."""
        for name, value in self._described().items():
            if (stored := state.get(name)) != value:
                held = f"{self.folder} holds a run with {name}={stored!r}"
                raise FedHistError(f"{held}, this one has {value!r}; use another folder.")
        before, now = state.get("num_clients"), self._options.num_clients
        fits = before == now or (before is not None and now is not None and now > before)
        if not fits:
            held = f"{self.folder} holds a run with num_clients={before!r}, this one has {now!r}"
            raise FedHistError(f"{held}; a run may be resumed with more clients, else use another folder.")

    def _described(self) -> dict[str, Any]:
        """Return what must be the same when a run is resumed."""
        options, wire = self._options, self._wire
        return {
            "method": options.method.name,
            "authenticated": options.authenticated,
            "privacy": [[part.noise_multiplier, part.clip, part.noise] for part in privates(options.method.strategy)],
            **{name: values_of(options)[name] for name in options_of(ServerOptions) if name not in NOT_DESCRIBED},
            "entries": [[name, kind, list(shape)] for name, (kind, shape) in wire.shapes.items()],
            "trained": wire.trained,
        }

    def begin(self, server: Server, source: Network, result: Result, expected: int, setting: dict[str, Any]) -> None:
        """Save the round that was closed just now, while the next one is under way."""
        server.refuse_hidden_state()
        tensors, facts = server.state()
        lists = {name: facts.pop(name) for name in ("events", "evaluations")}
        for name in METRICS:
            lists[name] = [[r, dict(values)] for r, values in getattr(result, name).items()]
        facts.pop("screen")
        # All but these stay as they are once they are in the list.
        lists["counted"] = [[place, each] for place, each in enumerate(lists["events"]) if "times" in each]
        accounts = source.exchange.accounts
        state = self._described() | lists | {
            "num_clients": self._options.num_clients,
            "expected": expected,
            "server": facts,
            "elapsed": source.now,
            "traffic": [source.exchange.models, source.exchange.uploads],
            "clients": dict(source.exchange.numbers),
            "admitted": sorted(accounts.admitted) if accounts else [],
            "run": source.run,
            "history": {"metrics": server.history.metrics, "setting": setting},
            "screens": {part: screen.state() for part, screen in source.exchange.screens.items()},
            "configs": {kind: _as_json(config) for kind, config in source.configs.items()},
        }  # fmt: skip
        arrivals = source.arrivals
        rows = {} if arrivals is None else touched_rows(server.strategy, arrivals)
        rows = {f"strategy.{name}": where for name, where in rows.items()}
        self._journal.write({**tensors, **source.state()[0]}, state, rows)
        self._begun = server.round

    def wait(self) -> None:
        """Return when all that was begun is on the disk; raise an OSError if it could not be written."""
        self._journal.wait()
        self.round = self._begun

    def close(self) -> None:
        """Write what was begun, and end."""
        self._journal.close()

    def restore(self, before: State, server: Server, source: Network, result: Result, room: int) -> None:
        """Let a server with room for so many clients continue where the one before was."""
        tensors, state = before
        try:
            tensors = _with_more_clients(tensors, server.state()[0], state["num_clients"], room)
            lists = {name: state[name] for name in ("events", "evaluations")}
            exchange = source.exchange
            server.restore(tensors, state["server"] | lists | {"screen": state["screens"][DELTA]})
            source.restore([tensors])
            for part in exchange.screens.keys() & state["screens"].keys() - {DELTA}:
                exchange.screens[part].restore(state["screens"][part])
            exchange.numbers.restore(state["clients"])
            exchange.models, exchange.uploads = map(int, state.get("traffic", (0, 0)))
            if exchange.accounts is not None:
                exchange.accounts.admitted.update(state["admitted"])
            self.round = self._begun = server.round
            self._journal.step = int(state[STEP])
            for name in METRICS:
                setattr(result, name, {int(r): MetricRecord(values) for r, values in state[name]})
            for kind, config in state["configs"].items():
                source.configs[kind].update(_from_json(config))
            source.evaluations.resume()
            source.begin(float(state["elapsed"]))
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError, OverflowError) as error:
            raise FedHistError(f"{self.folder} holds a run that cannot be resumed: {reason(error)}.") from error
        exchange.note(source.now, "resumed")


def _with_more_clients(
    tensors: Mapping[str, Tensor], fresh: Mapping[str, Tensor], before: int | None, now: int
) -> dict[str, Tensor]:
    """Return the tensors of a run with room for more clients, about whom nothing is known yet."""
    if before is None or before == now:
        return dict(tensors)
    found = dict(tensors)
    for name, like in fresh.items():
        old = tensors.get(name)
        grown = (
            old is not None and old.dim() and old.shape[1:] == like.shape[1:] and (len(old), len(like)) == (before, now)
        )
        if name.startswith("strategy.") and old is not None and grown:
            found[name] = like.clone()
            found[name][:before] = old
    # Where there are many, histories keep a sample of the clients, which is another one now.
    for name, table in tensors.items():
        if name.startswith(("traces.", "per_client.")) and now > MOST_CLIENTS:
            del found[name]
        elif name.startswith(("traces.", "per_client.")) and table.dim() == 2 and table.shape[1] == before:
            empty = 0.0 if name.startswith("traces.") else torch.nan
            found[name] = torch.nn.functional.pad(table, (0, now - before), value=empty)
    return found


def _as_json(config: ConfigRecord) -> dict[str, Any]:
    """Return a configuration as JSON has it."""
    return {name: {BYTES: value.hex()} if isinstance(value, bytes) else value for name, value in config.items()
            if not (isinstance(value, list) and any(isinstance(each, bytes) for each in value))}  # fmt: skip


def _from_json(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: bytes.fromhex(value[BYTES]) if isinstance(value, dict) else value for name, value in config.items()}
