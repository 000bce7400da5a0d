"""Accounts of privacy spent: whose they are, where they start, and that nothing is published before it is saved."""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")
pytest.importorskip("dp_accounting", reason="dp-accounting is not installed (pip install 'fedhist[privacy]')")

import fedhist as fh
from fedhist.flower import KAsync
from fedhist.flower.accounts import UNNOTICED, Accounts
from fedhist.store import snapshot
from fedhist.store.journal import Journal
from fedhist.strategies.base import Wrapper
from fedhist.strategies.private import gaussian_epsilon
from tests.flower.grid import FakeGrid
from tests.flower.helpers import Killed, kill_in, kinds, moved, network, run
from tests.flower.test_privacy import accuracy


def ledger(num_clients: int = 9, *, authenticated: bool = False) -> tuple[fh.Private, Accounts]:
    """Return a strategy that accounts for clients, and accounts for nodes."""
    private = fh.Private(fh.FedAvg(), 1.0, 1.0).setup(num_clients, 2, 4)
    return private, Accounts([private], num_clients, authenticated=authenticated)


def private(**options: Any) -> fh.Private:
    return fh.Private(fh.FedAvg(), 1.0, 2.0, **options)


def accounts_in(server: KAsync) -> list[dict[str, Any]]:
    return [event for event in server.history.events if event["event"] == "account"]


def sent_rounds(grid: FakeGrid) -> set[int]:
    return {int(message.content["config"]["server-round"]) for message in grid.sent}


def test_the_first_nodes_are_admitted_at_once_with_nothing_spent() -> None:
    _, accounts = ledger()
    assert accounts.meet([], (), 0.0) == []
    facts = accounts.meet([8, 7], (), 0.5)
    assert [(fact.node, fact.about) for fact in facts] == [
        (7, {"client": 0, "spent": 0.0}),
        (8, {"client": 1, "spent": 0.0}),
    ]
    assert accounts.admitted == {7, 8}


def test_a_newcomer_waits_until_the_dead_are_known_and_has_spent_what_the_busiest_of_them_had() -> None:
    private, accounts = ledger()
    accounts.meet([7, 8, 9], (), 0.0)
    private.spent[:3] = private.spent.new_tensor([2.0, 5.0, 3.5])
    assert accounts.meet([7, 8, 9, 20], (), 10.0) == []  # 9 has died and is still listed
    accounts.meet([7, 8, 20], (), 60.0)
    assert accounts.admitted == {7, 8}
    assert accounts.meet([7, 8, 20], (), 9.9 + UNNOTICED) == []
    assert accounts.meet([7, 8, 20], (), 10.0 + UNNOTICED) == [
        ("account", 20, {"client": 3, "spent": 3.5, "of": 2})  # not 5: node 8 is here
    ]
    assert private.spent.tolist()[:5] == [2.0, 5.0, 3.5, 3.5, 0.0]


def test_time_since_the_last_look_does_not_count_as_waiting() -> None:
    """A server that was held up for long must look again before it can know who has died."""
    private, accounts = ledger()
    accounts.meet([7], (), 0.0)
    private.spent[0] = 4.0
    accounts.meet([7, 20], (), 1.0)
    assert accounts.admitted == {7}
    (fact,) = accounts.meet([20], (), 500.0)
    assert fact.about == {"client": 1, "spent": 4.0, "of": 0}


def test_an_upload_of_a_node_that_is_gone_counts_before_it_is_counted() -> None:
    """It waits for its round to close, or comes in late, and its client has already returned as another node."""
    private, accounts = ledger()
    accounts.meet([7, 8], (), 0.0)
    private.spent[0] = 4.0
    accounts.meet([8, 20], [7], 10.0)
    (fact,) = accounts.meet([8, 20], [7], 10.0 + UNNOTICED)
    assert fact.about == {"client": 2, "spent": 5.0, "of": 0}


def test_a_node_that_returns_may_have_been_another_meanwhile() -> None:
    private, accounts = ledger()
    accounts.meet([7, 8], (), 0.0)
    private.spent[0] = 4.0
    accounts.meet([8, 20], (), 10.0)
    accounts.meet([8, 20], (), 200.0)
    private.spent[2] += 3  # 20, which is 7 without its key
    accounts.meet([8, 7], (), 300.0)
    assert accounts.admitted == {8}
    assert accounts.meet([8, 7], (), 400.0) == [("account", 7, {"client": 0, "spent": 7.0, "of": 2})]
    assert accounts.meet([8], (), 401.0) == accounts.meet([8, 7], (), 402.0) == accounts.meet([8, 7], (), 500.0) == []
    assert accounts.admitted == {7, 8}
    assert private.spent.tolist()[:3] == [7.0, 0.0, 7.0]


def test_with_keys_a_newcomer_starts_at_zero_and_one_that_returns_where_it_was() -> None:
    private, accounts = ledger(authenticated=True)
    accounts.meet([7, 8], (), 0.0)
    private.spent[:2] = 4.0
    assert accounts.meet([8, 20], (), 10.0) == [("account", 20, {"client": 2, "spent": 0.0})]
    assert accounts.meet([8, 7, 20], (), 20.0) == []
    assert accounts.admitted == {7, 8, 20}
    assert private.spent.tolist()[:3] == [4.0, 4.0, 0.0]


@pytest.mark.parametrize("authenticated", [False, True])
def test_a_number_is_never_given_to_another_node(authenticated: bool) -> None:
    _, accounts = ledger(2, authenticated=authenticated)
    accounts.meet([7, 8], (), 0.0)
    facts = [fact for time in (10.0, 110.0, 120.0, 130.0) for fact in accounts.meet([7, 9], (), time)]
    assert accounts.admitted == {7}
    reason = "all num_clients=2 accounts are taken, and none is given to another node"
    assert facts == [("refused", 9, {"reason": reason})]  # said once
    accounts.meet([7, 8], (), 200.0)
    accounts.meet([7, 8], (), 300.0)
    assert accounts.admitted == {7, 8}
    assert accounts.numbers == {"node 7": 0, "node 8": 1}


def test_names_are_claims_and_open_no_account() -> None:
    """Two nodes that name themselves after a third one spend on their own accounts, and a name is worth no number."""
    claims = {node: moved(-1.0, identity="partition 2") for node in (11, 12, 13)}
    server = run(network(claims), k=3, rounds=4, strategy=private(), num_clients=5, evaluate_fn=accuracy)
    assert server.session.source.exchange.numbers == {"node 11": 0, "node 12": 1, "node 13": 2}
    assert [sorted(row) for row in server.history.clients.tolist()] == [[0, 1, 2]] * 4
    assert "rejected" not in kinds(server)
    assert server.history.epsilon[-1] == gaussian_epsilon(2.0, 4, 1e-5)


def test_a_client_that_changes_its_name_and_its_node_keeps_its_account() -> None:
    grid = network({11: moved(-1.0, identity="a"), 12: moved(-1.0)}, [5.0, 5.0])
    grid.clock.at(23.0, lambda: grid.kill(11, notice=1))
    grid.clock.at(24.0, lambda: grid.add(99, moved(-1.0, identity="b"), 5.0))
    server = run(grid, k=2, rounds=8, strategy=private(), num_clients=9, evaluate_fn=accuracy)
    (inherited,) = accounts_in(server)[2:]
    known = {"time": pytest.approx(24.0 + UNNOTICED, abs=0.1), "round": 5, "event": "account", "node": 99, "client": 2}
    assert inherited == known | {"spent": 4.0, "of": 0, "at": inherited["at"]}
    assert server.history.epsilon[-1] == gaussian_epsilon(2.0, 8, 1e-5)


def test_an_upload_that_waits_while_its_client_returns_as_another_is_on_both_accounts() -> None:
    """Node 11 replies and dies; as node 99 it closes the very round in which its first upload waits."""
    grid = network({11: moved(-1.0), 12: lambda message: None}, [1.0, 1.0])
    grid.clock.at(2.0, lambda: grid.kill(11))
    grid.clock.at(2.5, lambda: grid.add(99, moved(-1.0)))
    server = run(grid, k=2, rounds=1, strategy=private(), num_clients=9, evaluate_fn=accuracy)
    assert server.history.clients.tolist() == [[0, 2]]
    assert server.history.epsilon == [gaussian_epsilon(2.0, 2, 1e-5)]


def test_a_reply_after_its_node_was_given_up_is_not_published_and_costs_nothing() -> None:
    grid = network({node: moved(-1.0) for node in (1, 2, 3)}, [1.0, 1.0, 9.0])
    server = run(grid, rounds=12, timeout=5, strategy=private(), num_clients=3, evaluate_fn=accuracy)
    assert "timed out" in kinds(server)
    spent = server.session.server.strategy.spent  # type: ignore[union-attr]
    assert spent.tolist() == [(server.history.clients == client).sum() for client in range(3)]


def test_a_private_strategy_inside_another_has_accounts_too() -> None:
    class Around(Wrapper):
        pass

    grid = network({11: moved(-1.0), 12: moved(-1.0)}, [5.0, 5.0])
    grid.clock.at(23.0, lambda: grid.kill(11, notice=1))
    grid.clock.at(24.0, lambda: grid.add(99, moved(-1.0), 5.0))
    server = run(grid, k=2, rounds=6, strategy=Around(private()), num_clients=9)
    assert server.session.server.strategy.inner.spent.tolist()[:3] == [4, 6, 6]  # type: ignore[union-attr]


def test_accounts_are_kept_however_many_events_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedhist.store.events.MOST_EVENTS", 1)
    with pytest.warns(UserWarning, match="in round 1: 1 events are kept; from here on those of each kind are counted"):
        server = run(network({1: moved(-1.0), 2: moved(-1.0)}), rounds=1, strategy=private())
    assert kinds(server) == ["joined", "summed up", "joined", "account", "account"]


def test_after_a_restart_known_nodes_go_on_and_new_ones_inherit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": private(), "num_clients": 9, "checkpoint": tmp_path, "evaluate_fn": accuracy}
    with pytest.raises(Killed):
        run(network({1: moved(-1.0), 2: moved(-1.0), 3: moved(-1.0)}), k=3, rounds=9, on_round=kill_in(4), **options)
    grid = network({1: moved(-1.0), 2: moved(-1.0), 77: moved(-1.0)})
    server = run(grid, k=3, rounds=9, **options)
    first = {m.metadata.dst_node_id for m in grid.sent if int(m.content["config"]["server-round"]) == 5}
    assert first == {1, 2, 77} and grid.clock.now > UNNOTICED
    assert accounts_in(server)[3]["node"] == 77 and accounts_in(server)[3]["spent"] == 4.0
    assert server.history.epsilon[-1] == gaussian_epsilon(2.0, 9, 1e-5)
    grid = network({1: moved(-1.0), 2: moved(-1.0), 77: moved(-1.0)})
    run(grid, k=3, rounds=12, **options)
    assert grid.clock.now < 10  # all were there when it was saved


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"authenticated": True}, "holds a run with authenticated=False, this one has True"),
        ({"strategy": fh.Private(fh.FedAvg(), 1.0, 9.0)}, "noise_multiplier=9"),
        ({"num_clients": 8}, "holds a run with num_clients=9"),
    ],
)
def test_what_accounts_rest_on_cannot_be_changed_on_the_way(
    other: dict[str, Any], message: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"strategy": private(), "num_clients": 9, "checkpoint": tmp_path}
    run(network({1: moved(-1.0), 2: moved(-1.0)}), rounds=1, **options)
    with pytest.raises(fh.FedHistError, match=message):
        run(network({1: moved(-1.0), 2: moved(-1.0)}), rounds=2, **options | other)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("fails", [1, 3])
def test_nothing_is_published_that_is_not_saved(fails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, evaluated = network({1: moved(-1.0), 2: moved(-1.0)}), list[int]()

    def evaluate(round_: int, _: object) -> None:
        evaluated.append(round_)

    def write(*arguments: Any) -> None:
        (full if arguments[2]["server"]["round"] == fails else real)(*arguments)

    real, done = Journal._write, list[int]()
    options: dict[str, Any] = {"strategy": private(), "checkpoint": tmp_path, "evaluate_every": 1}
    monkeypatch.setattr(Journal, "_write", write)
    with pytest.raises(
        fh.FedHistError, match=r"kasync.safetensors cannot be written: No space left on device; the serv"
    ):
        run(grid, rounds=5, evaluate_fn=evaluate, on_round=lambda round_, _: done.append(round_), **options)
    grid.clock.sleep(100)
    assert sent_rounds(grid) == set(range(1, fails + 1))  # version 1 is the first model, not that of round 1
    # Evaluations have a thread of their own; those that have not begun when the server stops are dropped.
    assert evaluated == list(range(len(evaluated))) and len(evaluated) <= fails and done == list(range(1, fails))
    monkeypatch.setattr(Journal, "_write", real)
    server = run(network({1: moved(-1.0), 2: moved(-1.0)}), rounds=5, evaluate_fn=accuracy, **options)
    assert server.history.epsilon[-1] == gaussian_epsilon(2.0, 5, 1e-5)


def test_two_servers_do_not_share_a_checkpoint(tmp_path: Path) -> None:
    """Each would publish models of its own, and know only of its own."""
    grid = network({1: moved(-1.0), 2: moved(-1.0)})

    def second(*_: object) -> None:
        with pytest.raises(fh.FedHistError, match="is in use by another process, which runs this already"):
            run(network({1: moved(-1.0), 2: moved(-1.0)}), rounds=2, strategy=private(), checkpoint=tmp_path)

    run(grid, rounds=2, strategy=private(), checkpoint=tmp_path, on_round=second)
    assert run(grid, rounds=3, strategy=private(), checkpoint=tmp_path).history.rounds == 3


def test_the_name_of_a_checkpoint_is_on_the_disk_before_anything_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = list[bool](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(stat.S_ISDIR(os.fstat(file).st_mode)), fsync(file)))
    snapshot.write(tmp_path / "file", "a kind", {}, {})
    assert synced == [False, True]


def test_what_is_saved_already_does_not_stop_a_run_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last save is of evaluations alone."""
    writers = iter([Journal._write] * 2)

    def write(*arguments: Any) -> None:
        next(writers, full)(*arguments)

    monkeypatch.setattr(Journal, "_write", write)
    server = run(network({1: moved(-1.0), 2: moved(-1.0)}), rounds=2, strategy=private(), checkpoint=tmp_path)
    assert kinds(server)[-1] == "not saved"


def test_a_server_that_saves_nothing_says_what_that_means(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("flwr").addHandler(caplog.handler)
    run(network({1: moved(-1.0), 2: moved(-1.0)}), rounds=1)
    assert "without a checkpoint" not in caplog.text
    run(network({1: moved(-1.0), 2: moved(-1.0)}), rounds=1, strategy=private())
    assert caplog.text.count("a server that is started again counts the privacy spent from zero") >= 1
    logging.getLogger("flwr").removeHandler(caplog.handler)


def test_two_nodes_of_one_client_at_a_time_are_two_clients() -> None:
    """Nothing can be held against this without keys; `docs/privacy.md` says so."""
    grid = network({1: moved(-1.0, identity="same"), 2: moved(-1.0, identity="same")})
    server = run(grid, rounds=3, strategy=private(), evaluate_fn=accuracy)
    assert server.history.epsilon[-1] == gaussian_epsilon(2.0, 3, 1e-5)


def test_authenticated_is_yes_or_no() -> None:
    with pytest.raises(fh.InvalidInput, match="authenticated must be True or False, got 'yes'."):
        KAsync(private(), 2, authenticated="yes")  # type: ignore[arg-type]


def test_nobody_is_sent_work_before_it_has_an_account() -> None:
    grid = network({1: moved(-1.0), 2: moved(-1.0)})
    grid.clock.at(5.0, lambda: grid.add(3, moved(-1.0)))
    run(grid, rounds=30, strategy=private(), evaluate_every=0)
    assert {message.metadata.dst_node_id for message in grid.sent} == {1, 2}
