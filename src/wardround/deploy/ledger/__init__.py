"""egress.jsonl: the hospital's own list of every message that left it, each line chained to the one before.

Whoever can write both the ledger and its head file can write a new chain; note the last hash elsewhere from
time to time, and even that shows. Nothing here imports torch.
"""

from wardround.deploy.ledger.verifying import Verdict, find, read, verify
from wardround.deploy.ledger.writing import NAME, Ledger, LedgerError, head_path

__all__ = ["NAME", "Ledger", "LedgerError", "Verdict", "find", "head_path", "read", "verify"]
