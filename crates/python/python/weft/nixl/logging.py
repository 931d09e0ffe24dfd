"""The log of `nixl`, under the names and by the variable that NIXL's own has."""

import logging
import os

_LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}


def get_logger(name: str) -> logging.Logger:
    """A logger below `nixl`. How it is written down is the application's to say; `NIXL_LOG_LEVEL` says from which level on."""
    level = os.environ.get("NIXL_LOG_LEVEL", "").strip().upper()
    if level in _LEVELS:
        logging.getLogger("nixl").setLevel(_LEVELS[level])
    return logging.getLogger(f"nixl.{name.rpartition('.')[2].lstrip('_')}")
