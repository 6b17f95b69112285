"""The engine's exceptions.

``ValueError`` is for bad input, as everywhere in Python. What stands here tells three other cases
apart: the device let us down (the request falls back to recomputation), the machine cannot give
what was asked for (start-up stops with the numbers), and a broken rule of our own (a bug).
"""


class KVFerryError(Exception):
    """Base of all errors that kvferry defines."""


class TransferError(KVFerryError):
    """A transfer failed on the device; always chained to what the device raised."""


class TransferTimeout(TransferError):
    """A transfer was not complete by its deadline."""


class IntegrityError(TransferError):
    """Loaded bytes did not match the checksum written when they were stored."""


class CapacityError(KVFerryError):
    """The machine cannot hold what was asked for; the message carries the numbers."""


class EngineClosed(KVFerryError):
    """The engine was used after ``close``."""


class InvalidTransition(KVFerryError):
    """A slot or lease was asked to do what its state does not allow: a bug; nothing was changed."""
