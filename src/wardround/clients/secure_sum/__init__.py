"""Secure summation of what clients send: the protocol's messages, with models in them.

The protocol itself is in `privacy/secure_sum`. Here `SumSession` drives it at the server, a `Sender` answers
at the client, and a `SumLayout` says which numbers are summed, in what order, and how they are rounded.
"""

from wardround.clients.secure_sum.layout import KEY, MODEL, SUM_TASKS, Terms, check_members
from wardround.clients.secure_sum.sender import Sender
from wardround.clients.secure_sum.session import SumSession

__all__ = ["KEY", "MODEL", "SUM_TASKS", "Sender", "SumSession", "Terms", "check_members"]
