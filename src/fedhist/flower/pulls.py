"""Replies pulled from the network, whatever nodes do to hold that up.

Flower unpacks replies as it pulls them. One that cannot be unpacked makes the whole call fail. One that was announced
and does not come blocks the call: while it is uploaded over a slow line, or for three minutes if its node has died
meanwhile. What else the call would have brought is lost: the SuperLink delivers a reply once, and answers with an error
when it is asked again. So calls are made beside the server's loop, and the nodes of one that failed or blocked are
asked for one by one, until they have answered promptly.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

import httpx
from flwr.app import Message
from flwr.supercore.error import FlowerError

from fedhist.errors import FedHistError, reason

PATIENCE, PATIENCE_ALONE = 5.0, 0.5
"""Seconds for which the server waits for a call; that for a single reply is looked at again in the next turn."""


class Unreadable(NamedTuple):
    """A reply that cannot be unpacked."""

    message: str
    """To which it replies."""
    reason: str


class Pulls:
    """The messages to which replies are outstanding.

    Parameters
    ----------
    pull
        Returns the replies there are to some messages.
    node_of
        Returns the node that was sent a message; None if its reply is not wanted any more.
    beside
        Whether calls may block, and so are made beside the server's loop. In one process they do not, and passing them
        to a thread would take longer than the calls.
    """

    def __init__(
        self, pull: Callable[[list[str]], list[Message]], node_of: Callable[[str], int | None], *, beside: bool
    ) -> None:
        self._pull, self._node_of, self._beside = pull, node_of, beside
        self._outstanding: deque[str] = deque()
        self._alone: set[int] = set()  # nodes that are asked for one by one
        self._late: deque[tuple[list[str], Future[list[Message]]]] = deque()  # calls that are not done yet

    def expect(self, message: str) -> None:
        """Ask for the reply to a message from now on."""
        self._outstanding.append(message)

    def turns(self, most: int) -> Iterator[list[Message | Unreadable]]:
        """Ask once for every reply that is outstanding, at most so many at a time; give what each call brings."""
        for _ in range(len(self._late)):
            turn, call = self._late.popleft()
            yield self._came(turn, call, None)
        left = len(self._outstanding)
        while left > 0:
            turn = []
            while left > 0 and len(turn) < most:
                node = self._node_of(self._outstanding[0])
                alone = node in self._alone
                if alone and turn:
                    break
                message = self._outstanding.popleft()
                left -= 1
                turn += [] if node is None else [message]
                if alone:
                    break
            if turn:
                yield self._came(turn, self._called(turn), PATIENCE_ALONE if alone else PATIENCE)

    def _called(self, turn: list[str]) -> Future[list[Message]]:
        """Begin a call; beside the loop, in a thread that does not keep the process from ending."""
        call = Future[list[Message]]()

        def run() -> None:
            try:
                call.set_result(self._pull(turn))
            except BaseException as error:  # it is raised where the result is asked for
                call.set_exception(error)

        if self._beside:
            threading.Thread(target=run, name="pull", daemon=True).start()
        else:
            run()
        return call

    def _came(self, turn: list[str], call: Future[list[Message]], seconds: float | None) -> list[Message | Unreadable]:
        """Return the replies that a call has brought, the oldest first; nothing if it takes longer than that."""
        if not call.done() and not wait([call], seconds or 0).done:
            if len(turn) > 1:
                self._one_by_one(turn)
                turn = []
            self._late.append((turn, call))
            return []
        try:
            pulled = call.result()
        except (httpx.HTTPError, FlowerError, FedHistError):  # not of a reply's making
            raise
        except Exception as error:
            if len(turn) == 1:
                return [Unreadable(turn[0], f"it cannot be unpacked: {type(error).__name__}: {reason(error)}")]
            self._one_by_one(turn)
            return []
        answered = {reply.metadata.reply_to_message_id for reply in pulled}
        self._outstanding.extend(each for each in turn if each not in answered)
        if seconds is not None:  # a slow node is still one
            self._alone -= {self._node_of(each.metadata.reply_to_message_id) for each in pulled if not each.has_error()}
        return [*sorted(pulled, key=lambda reply: reply.metadata.created_at)]

    def _one_by_one(self, turn: Sequence[str]) -> None:
        """Ask again for each of these replies."""
        self._alone.update(node for each in turn if (node := self._node_of(each)) is not None)
        self._outstanding.extend(turn)
