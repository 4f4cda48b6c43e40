"""The errors a user may meet.

    WardroundError
      |-- ConfigError       the configuration is wrong: exit code 2
      |-- DataError         a folder, scan or label is wrong: exit code 2
      |-- ClientError       a client could not do its task: it leaves the round
      |-- TooFewClients     so many left that the run stops, with a checkpoint
      '-- CheckpointError   a checkpoint cannot be read or belongs to another run: exit code 2

Each carries one or two sentences: what is wrong, where, and what to do next.
"""

from errno import ENOSPC


class WardroundError(Exception):
    """An error with a message for users; the command line prints the message alone."""

    exit_code = 1


class ConfigError(WardroundError):
    """The user's configuration cannot be run."""

    exit_code = 2


class DataError(WardroundError):
    """A folder, image or label cannot be used."""

    exit_code = 2


class CheckpointError(WardroundError):
    """A run folder cannot be continued."""

    exit_code = 2


class ClientError(WardroundError):
    """One client failed; the round goes on without it."""


class TooFewClients(WardroundError):
    """Fewer clients answered than `min_clients` asks for."""


def explain(error: Exception) -> str:
    """What went wrong, for users: a message of ours as it is, one of the system with its file.

    >>> explain(FileNotFoundError(2, "No such file or directory", "a.yaml"))
    'a.yaml: No such file or directory.'
    """
    if isinstance(error, WardroundError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        advice = " Free some space; a run then continues with --resume." if error.errno == ENOSPC else ""
        return f"{where}{error.strerror or error}.{advice}"
    return f"{type(error).__name__}: {error}"
