"""The errors that lorabench raises on purpose.

Every message names the file, the key, what was expected, what was found and what to do.
"""

import difflib
from collections.abc import Iterable


class LorabenchError(Exception):
    """Anything that lorabench refuses or finds wrong, told for a person."""


class FileError(LorabenchError):
    """A weights file is missing, damaged, or not what it claims to be."""


class AdapterError(LorabenchError):
    """An adapter can't be applied to this base exactly as its file says."""


class ConfigError(LorabenchError):
    """A recipe, strategy or option that can't be meant as written."""


class UnavailableError(LorabenchError):
    """A path was asked for by name that this machine or build doesn't have."""


class WeightsLostError(LorabenchError):
    """Resident weights whose bits are no longer known; load them again."""


class CheckError(LorabenchError):
    """A result that was checked and found wrong."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean '...'?)"`` for the closest known word, or nothing."""
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
