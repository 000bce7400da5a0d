"""The same strategies on a real network, as a Flower app (``pip install 'fedhist[flower]'``).

On the server, :class:`KAsync` stands where a Flower strategy would. On the clients, any ClientApp will do;
:func:`load` and :func:`reply` save some lines, and :func:`privatise` hides what a client has learnt.
"""

try:
    from fedhist.flower.client import load, privatise, received, reply
    from fedhist.flower.kasync import KAsync
except ModuleNotFoundError as error:
    if (error.name or "").startswith("flwr"):
        sentence = "fedhist.flower needs Flower; install it with: pip install 'fedhist[flower]'."
        raise ModuleNotFoundError(sentence, name="flwr") from None
    raise

__all__ = ["KAsync", "load", "privatise", "received", "reply"]
