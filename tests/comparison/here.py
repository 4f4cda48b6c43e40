"""A stand-in for the process of a run, so that tests need not wait for one."""

import wardround as wr
from wardround.errors import WardroundError


class Here:
    """Stands in for a process: trains at once, in this one."""

    returncode = 0

    def __init__(self, command: list[str]) -> None:
        self.errors = ""
        try:
            wr.run(command[4], resume="--resume" in command, overwrite="--overwrite" in command)
        except WardroundError as error:
            self.errors, self.returncode = f"error {error}\n", error.exit_code

    def poll(self) -> int:
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        return "", self.errors

    def kill(self) -> None: ...
