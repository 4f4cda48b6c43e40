"""A stand-in for the process of runs, so that tests need not wait for one."""

from collections import deque
from typing import Any

from wardround.batch_process import do_run


class Here:
    """Stands in for a `ChildProcess`: does each run at once, in this process."""

    def __init__(self, module: str, *_: Any, **__: Any) -> None:
        self._lines: deque[Any] = deque()

    def send(self, request: Any) -> None:
        do_run(request, self._lines.append)

    def receive(self, deadline: float) -> Any:
        if not self._lines:
            raise TimeoutError
        return self._lines.popleft()

    def kill(self) -> None: ...

    def stop(self) -> None: ...
