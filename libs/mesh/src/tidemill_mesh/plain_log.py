"""Log lines for a file or a pipe: what structlog's console renderer writes without colours, at a tenth of its cost."""

from collections.abc import MutableMapping
from typing import Any

import structlog

EVENT_WIDTH = 30
_QUOTED = frozenset(" \t=\r\n\"'")
_TRACEBACKS = ("exc_info", "exception", "stack_info", "stack")


class PlainRenderer:
    """`time [level    ] event   key=value ...`, keys in order."""

    def __init__(self) -> None:
        self._with_traceback = structlog.dev.ConsoleRenderer(
            colors=False, exception_formatter=structlog.dev.plain_traceback
        )

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
        """One line; several where there is a traceback."""
        if any(event.get(name) for name in _TRACEBACKS):
            return str(self._with_traceback(logger, method, event))
        time = event.pop("timestamp", "")
        level = event.pop("level", method)
        text = str(event.pop("event", ""))
        pairs = " ".join([f"{key}={_shown(event[key])}" for key in sorted(event)])
        return f"{time} [{level:<9}] {text:<{EVENT_WIDTH}} {pairs}".rstrip()


def _shown(value: Any) -> str:
    if isinstance(value, str) and not _QUOTED.intersection(value):
        return value
    return repr(value)
