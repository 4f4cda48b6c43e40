"""Client: one participant. Clients: the server's view of all of them, with one verb, `ask`.

A method file sees these two. `gate` checks every reply, `traffic` recodes what travels; a `SyncState`
keeps clients' memories in step with the server.
"""

from wardround.clients.client import Client
from wardround.clients.clients import Answer, Clients, Exchange, Snapshot, SyncState, Transport
from wardround.clients.gate import Registration

__all__ = ["Answer", "Client", "Clients", "Exchange", "Registration", "Snapshot", "SyncState", "Transport"]
