"""Logging: structlog set up once, by the composition root. Events in the past tense with key-values, console or JSON.

Never a prompt, an answer or a secret: values under such keys are dropped whatever a caller passes, and text from
outside is escaped, so that no name of a stranger's can write to the terminal.
"""

from __future__ import annotations

import logging
import math
import sys
from typing import Literal

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

NEVER_LOGGED = frozenset(
    ("prompt", "messages", "text", "answer", "content", "tokens", "token_ids", "secret", "key", "body", "stop", "tools")
)
MAX_VALUE = 500  # characters of a value
TELL_AGAIN_S = 60.0  # between lines that say the same
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

Logger = FilteringBoundLogger


def configure_logging(form: Literal["console", "json"], level: Literal["debug", "info", "warning", "error"]) -> Logger:
    """Sets up structlog to write lines to stderr and returns the daemon's logger."""
    colors = form == "console" and sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=24, sort_keys=False)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso" if form == "json" else "%H:%M:%S", utc=form == "json"),
            structlog.processors.format_exc_info,
            drop_private,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    # Libraries log by the standard library. zeroconf warns once for each packet and interface that is odd; what matters
    # of that is reported by net/discovery.py.
    logging.basicConfig(stream=sys.stderr, format="%(name)s: %(message)s", level=logging.ERROR)
    logging.getLogger("zeroconf").setLevel(logging.CRITICAL)
    accepting = logging.getLogger("trio.serve_listeners")
    accepting.handlers, accepting.propagate = [_Unaccepted()], False
    logger: Logger = structlog.get_logger()
    return logger


class _Unaccepted(logging.Handler):
    """Tells from time to time that connections wait for want of descriptors; trio has a traceback each 100 ms."""

    _told_at = -math.inf

    def emit(self, record: logging.LogRecord) -> None:
        if record.created >= self._told_at + TELL_AGAIN_S:
            self._told_at = record.created
            error = record.exc_info[1] if record.exc_info else None
            reason = (error.strerror if isinstance(error, OSError) else None) or record.getMessage()
            structlog.get_logger().error("connections_not_accepted", reason=reason.lower())


def drop_private(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """A structlog processor: private keys out, strings escaped and bounded."""
    kept = {name: value for name, value in event.items() if name not in NEVER_LOGGED}
    return {name: value if name == "exception" else _safe(value) for name, value in kept.items()}


def _safe(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = value if value.isprintable() else value.encode("unicode_escape").decode("ascii")
    return text if len(text) <= MAX_VALUE else text[:MAX_VALUE] + "…"
