"""What a daemon logs of its mesh: the events that the Node, discovery and strangers give rise to, each at its level.

A dial that fails as it did the last time is told once: peers that are away are dialled for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from meshllm.daemon.served_model import ModelFollower
from meshllm.errors import NoModelError
from meshllm.log import Logger
from meshllm.mesh.actions import Field

MAX_DIAL_REASONS: Final = 256  # targets whose last reason is remembered
_WARNINGS: Final = ("_lost", "_refused", "_failed", "_broken", "_incompatible", "_cloned")


class Reports:
    """Writes to the daemon's log."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._dial_reasons: dict[str, str] = {}  # the last one told, by target

    def of_node(self, event: str, fields: Mapping[str, Field]) -> None:
        """What the Node reports."""
        level = self._log.warning if event.endswith(_WARNINGS) else self._log.info
        if event == "dial_failed":
            target, reason = str(fields.get("target")), str(fields.get("reason"))
            if self._dial_reasons.get(target) == reason:
                level = self._log.debug
            if len(self._dial_reasons) >= MAX_DIAL_REASONS:
                self._dial_reasons.clear()
            self._dial_reasons[target] = reason
        level(event, **fields)

    def of_discovery(self, event: str, detail: str) -> None:
        """What discovery reports of interfaces and announcements."""
        (self._log.warning if event.endswith("_failed") else self._log.info)(event, detail=detail)

    def of_model(self, models: ModelFollower, context: int | None) -> None:
        """The model that was opened, and whether it has the context that was asked for; or the file that could not be
        opened. None at all is a fault only if it was asked for.
        """
        served, error = models.served, models.error
        if served is not None:
            self._log.info("model_opened", model=served.name, sha256=served.sha256[:16], bytes=served.size)
            longest = served.file.hyperparameters.context_length
            if context is not None and context > longest:
                reason = f"{served.name} was made for {longest}"
                self._log.warning("context_limited", asked=context, used=longest, reason=reason)
        elif error is not None and (models.named or not isinstance(error, NoModelError)):
            self._log.error("model_failed", reason=str(error))

    def of_stranger(self, address: str, reason: str, untold: int) -> None:
        """Somebody who could not join; `untold`: how many more since the last line."""
        self._log.warning("stranger_refused", address=address, reason=reason, not_told=untold)
