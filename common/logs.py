"""Logs: one structured line an event on standard output, for people on a terminal and in JSON elsewhere."""

from __future__ import annotations

import logging
import sys

import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(output: str = "auto", level: str = "info") -> None:
    """Set up structlog for this process; `output` is auto, json or pretty."""
    pretty = output == "pretty" or (output == "auto" and sys.stdout.isatty())
    last = structlog.dev.ConsoleRenderer() if pretty else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if pretty else [structlog.processors.format_exc_info]),
            last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
    # Libraries log through the standard module; theirs matter from warnings on.
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
