"""The same strategies on a real network, as a Flower app (``pip install 'fedhist[flower]'``).

On the server, :class:`KAsync` stands where a Flower strategy would. On the clients, any ClientApp will do;
:func:`load` and :func:`reply` save some lines, :func:`privatise` hides what a client has learnt, and
:class:`ClientSide` is the clients' half of methods such as SCAFFOLD.
"""

try:
    from fedhist.flower.client import load, privatise, received, reply
    from fedhist.flower.client_side import ClientSide
    from fedhist.flower.kasync import KAsync
except ModuleNotFoundError as error:
    if (error.name or "").startswith("flwr"):
        sentence = "fedhist.flower needs Flower; install it with: pip install 'fedhist[flower]'."
        raise ModuleNotFoundError(sentence, name="flwr") from None
    raise

__all__ = ["ClientSide", "KAsync", "load", "privatise", "received", "reply"]
