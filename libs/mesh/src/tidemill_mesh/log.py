"""Structured logs: structlog alone, to stderr, as console lines or JSON."""

import logging
import sys
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog
from structlog.tracebacks import ExceptionDictTransformer

from tidemill_mesh.plain_log import PlainRenderer

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(format: str, level: str, service: str, instance: str) -> None:
    """Sets up this process's logging; every line carries service and instance.

    Tracebacks show no frame's locals, in any form: among them are prompts and API keys.
    """

    def add_identity(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.setdefault("service", service)
        event.setdefault("instance", instance)
        return event

    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        add_identity,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if format == "json":
        tracebacks = structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False))
        processors += [tracebacks, structlog.processors.JSONRenderer()]
    elif sys.stderr.isatty():
        processors += [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    else:
        processors += [PlainRenderer()]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        # A line and its end in one write: a worker's ranks write to the same file.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    _bridge_stdlib(LEVELS[level])


class _StructlogHandler(logging.Handler):
    """Hands what libraries log by the standard library on to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        """Logs the record under its logger's name."""
        method = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning"}
        emit = getattr(structlog.get_logger(), method.get(record.levelno, "error"))
        emit(record.getMessage(), logger=record.name, exc_info=record.exc_info)


def _bridge_stdlib(level: int) -> None:
    root = logging.getLogger()
    root.handlers = [_StructlogHandler()]
    root.setLevel(max(level, logging.WARNING))


class RateLimit:
    """Lets one event through each interval and counts those it held back."""

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._next = 0.0
        self._held_back = 0

    def passes(self) -> int | None:
        """None: hold this one back; else the number held back since the last one that passed."""
        now = self._clock()
        if now < self._next:
            self._held_back += 1
            return None
        self._next = now + self._interval_s
        held_back, self._held_back = self._held_back, 0
        return held_back
