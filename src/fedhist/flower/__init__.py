"""The same strategies on a real network, as a Flower app (``pip install 'fedhist[flower]'``).

On the server, :class:`KAsync` stands where a Flower strategy would. On the clients, any ClientApp will do;
:func:`load` and :func:`reply` save some lines, and :func:`privatise` hides what a client has learnt.
"""

from fedhist.flower.client import load, privatise, received, reply
from fedhist.flower.kasync import KAsync

__all__ = ["KAsync", "load", "privatise", "received", "reply"]
