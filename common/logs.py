"""Logs: one structured line an event on standard output, for people on a terminal and in JSON elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, get_args

import structlog

LevelName = Literal["debug", "info", "warning", "error"]
LEVELS: dict[str, int] = {name: getattr(logging, name.upper()) for name in get_args(LevelName)}


class _Threshold:
    """The least severe that is written, of this whole process. A processor, so that it can change while it runs."""

    def __init__(self) -> None:
        self.name: LevelName = "info"

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if LEVELS.get(method, logging.CRITICAL) < LEVELS[self.name]:
            raise structlog.DropEvent
        return event


_threshold = _Threshold()


def level() -> LevelName:
    """The least severe that is written now."""
    return _threshold.name


def set_level(name: LevelName) -> None:
    """Write what is at least so severe from now on."""
    _threshold.name = name


def configure(output: str = "auto", name: LevelName = "info") -> None:
    """Set up structlog for this process; `output` is auto, json or pretty."""
    set_level(name)
    pretty = output == "pretty" or (output == "auto" and sys.stdout.isatty())
    last = structlog.dev.ConsoleRenderer() if pretty else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            _threshold,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if pretty else [structlog.processors.format_exc_info]),
            last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.WriteLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
    # Libraries log through the standard module; theirs matter from warnings on, and below may hold what is no one's
    # business, as URLs with tokens.
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
