"""Records of measured cases: their schema, their JSON lines, and a frame of them.

Raw samples stand beside the machine's fingerprint, and machines are never mixed, as in psf/pyperf
``_metadata.py``.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

from lorabench.errors import ConfigError, FileError
from lorabench.machine import machine_name

if TYPE_CHECKING:
    import pandas as pd

JSON: TypeAlias = "str | int | float | bool | Sequence[JSON] | Mapping[str, JSON] | None"

SCHEMA = 1
PROVENANCES = ("measured", "derived", "predicted", "published")

_BEGINNING = b'{"schema": '  # of every line

_SAMPLED = ("n", "median_s", "min_s", "spread", "gflops_per_s", "peak_private_bytes")
_ORIGIN = ("provenance", "source", "machine", "commit", "time", "check")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One case and what is known of it; everything in it is plain JSON, copied from what was given.

    Parameters
    ----------
    case
        What was run, by name: a column of the frame for each field.
    seconds, warmup_seconds
        Raw samples in the order taken.
    counted
        Work and bytes by name, as ``flops`` (two for each MAC), ``bytes_read``, ``bytes_written``.
    peak_private_bytes
        Of the process that ran this case alone; None where it wasn't watched.
    check
        What was checked of the result, and how it came out.
    environment
        The machine and its software: see `environment`.
    commit
        The code that ran: see `git_commit`.
    time
        When the record was made, ISO 8601 in UTC.
    provenance
        ``measured``, ``derived`` (from measured ones), ``predicted`` or ``published``.
    source
        Where the figure is from or how it was arrived at, unless it was measured.
    details
        What belongs to the figures: memory over time, stacks; single values become columns.

    Raises
    ------
    ConfigError
        A field isn't JSON, a number isn't finite, the provenance is unknown or lacks its source, a
        measured record lacks samples or a check, or two columns would have one name.
    """

    case: Mapping[str, JSON]
    seconds: tuple[float, ...] = ()
    warmup_seconds: tuple[float, ...] = ()
    counted: Mapping[str, int | float] = field(default_factory=dict)
    peak_private_bytes: int | None = None
    check: str = ""
    environment: Mapping[str, JSON]
    commit: str
    time: str = field(default_factory=_now)
    provenance: str
    source: str = ""
    details: Mapping[str, JSON] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("case", "counted", "environment", "details"):
            object.__setattr__(self, name, _plain_mapping(getattr(self, name), name))
        for name in ("seconds", "warmup_seconds"):
            object.__setattr__(self, name, _durations(getattr(self, name), name))
        for name in ("check", "commit", "time", "provenance", "source"):
            if not isinstance(value := getattr(self, name), str):
                raise ConfigError(f"record {name}: expected text, found {value!r}")
        for name, value in self.counted.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"record counted.{name}: expected a number, found {value!r}")
        peak = self.peak_private_bytes
        if peak is not None and (isinstance(peak, bool) or not isinstance(peak, int) or peak < 0):
            raise ConfigError(f"record peak_private_bytes: expected bytes or None, found {peak!r}")
        self._check_origin()
        columns = Counter(
            [*_flat(self.case), *self.counted, *_single(self.details), *_SAMPLED, *_ORIGIN]
        )
        if twice := [name for name, times in columns.items() if times > 1]:
            raise ConfigError(
                f"record case, counted, details: {twice} would name two columns of a frame; rename"
            )

    def _check_origin(self) -> None:
        if self.provenance not in PROVENANCES:
            raise ConfigError(
                f"record provenance: expected one of {PROVENANCES}, found '{self.provenance}'"
            )
        if self.provenance != "measured" and not self.source.strip():
            raise ConfigError(
                f"record source: a {self.provenance} record says where its figures come from"
            )
        if self.provenance == "measured" and not any(self.seconds):
            raise ConfigError(f"record seconds: expected a measured time, found {self.seconds}")
        if self.provenance == "measured" and not self.check.strip():
            raise ConfigError(
                "record check: a measured record says what was checked and how it came out"
            )
        if not self.commit:
            raise ConfigError("record commit: expected a commit or 'unknown', found nothing")
        try:
            offset = datetime.fromisoformat(self.time).utcoffset()
        except ValueError:
            offset = None
        if offset != timedelta(0):
            raise ConfigError(f"record time: expected ISO 8601 in UTC, found '{self.time}'")


def _plain(value: object, where: str) -> JSON:
    """Return a copy made of JSON's own types, or say which part of ``value`` isn't one."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        if not math.isfinite(value):
            raise ConfigError(f"record {where}: expected a finite number, found {value}")
        return float(value)
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise ConfigError(f"record {where}: expected names as keys, found {wrong}")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise ConfigError(f"record {where}: expected JSON, found a {type(value).__name__}: {value!r}")


def _plain_mapping(value: object, where: str) -> dict[str, JSON]:
    plain = _plain(value, where)
    if not isinstance(plain, dict):
        raise ConfigError(f"record {where}: expected a mapping, found {value!r}")
    return plain


def _durations(values: object, where: str) -> tuple[float, ...]:
    plain = _plain(values, where)
    if not isinstance(plain, list):
        raise ConfigError(f"record {where}: expected a tuple of seconds, found {values!r}")
    seconds: list[float] = []
    for i, value in enumerate(plain):
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(f"record {where}[{i}]: expected seconds >= 0, found {value!r}")
        seconds.append(float(value))
    return tuple(seconds)


def key(case: Mapping[str, JSON]) -> str:
    """Return one text for equal cases: the order of fields, and 1 or 1.0, make no difference.

    A sweep skips the cases whose key is already in its file for the same machine.
    """

    def number(text: str) -> int | float:
        return int(value) if (value := float(text)).is_integer() else value

    plain = json.loads(json.dumps(_plain_mapping(case, "case")), parse_float=number)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def append(path: Path, *records: Record) -> None:
    """Append records to a file of JSON lines, all at once, and return when they are on the disk.

    Folders are made as needed. If a run was killed while it wrote the last line, what it left of
    that line is dropped first, with a warning. Writers wait for each other.

    Raises
    ------
    FileError
        The file can't be written.
    """
    import fcntl

    lines = "".join(
        json.dumps({"schema": SCHEMA, **asdict(record)}, allow_nan=False) + "\n"
        for record in records
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:  # append mode: at the end, wherever others have moved it
            fcntl.flock(file, fcntl.LOCK_EX)
            _end_last_line(file, path)
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise FileError(
            f"{path}: can't append a record ({error.strerror}); free or fix it"
        ) from error


def _end_last_line(file: BinaryIO, path: Path) -> None:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 1))
    if file.read() in (b"", b"\n"):
        return
    file.seek(0)
    last = file.read().rpartition(b"\n")[2]
    if _is_json(last):
        file.write(b"\n")  # killed between a whole record and its newline
    elif not last.startswith(_BEGINNING[: len(last)]):
        raise FileError(
            f"{path}: ends in something that is no record ({last[:40]!r}); give a file of records"
        )
    else:
        _warn_torn(path, last)
        file.truncate(end - len(last))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _warn_torn(path: Path, line: bytes) -> None:
    message = (
        f"{path}: dropped a last record of {len(line)} bytes that a killed run left unfinished"
    )
    warnings.warn(message, stacklevel=4)


def read(path: Path) -> list[Record]:
    """Read the records of one file, or of every ``*.jsonl`` below a folder, in order of name.

    A last line that a killed run left unfinished is skipped with a warning.

    Raises
    ------
    FileError
        There is nothing at ``path``, a line isn't a record, or it is of a later schema.
    """
    if path.is_dir():
        return [record for file in sorted(path.rglob("*.jsonl")) for record in read(file)]
    if os.path.lexists(path) and not path.is_file():  # a pipe would be waited for
        raise FileError(f"{path}: expected a file or folder of records, found a device or pipe")
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except OSError as error:
        raise FileError(f"{path}: can't read records ({error.strerror})") from error
    if last and _is_json(last):
        lines.append(last)
    elif last:
        _warn_torn(path, last)
    return [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def _parse(line: bytes, place: str) -> Record:
    try:
        fields = json.loads(line)
        schema = fields.pop("schema")
        if schema == SCHEMA:
            return Record(**fields)
    except (
        *(ValueError, KeyError, TypeError, AttributeError),
        *(OverflowError, RecursionError, ConfigError),
    ) as error:
        raise FileError(
            f"{place}: expected a record of schema {SCHEMA}, found none ({error}); restore the file"
        ) from error
    raise FileError(
        f"{place}: expected schema {SCHEMA}, found {schema!r}; if it is newer, update lorabench"
    )


def to_frame(records: Iterable[Record]) -> pd.DataFrame:
    """Return a frame of one row a record, in order; nothing is aggregated, least of all machines.

    Columns: the case's fields (nested ones as ``outer.inner``), ``n``, ``median_s``, ``min_s``,
    ``spread`` (interquartile range over median), ``gflops_per_s`` (the counted ``flops`` over the
    median), ``peak_private_bytes``, everything counted, the details that are single values, then
    provenance, source, machine, commit, time, check. What a record doesn't have is missing in its
    row.
    """
    import pandas as pd

    records = list(records)
    case = dict.fromkeys(name for record in records for name in _flat(record.case))
    counted = dict.fromkeys(name for record in records for name in record.counted)
    details = dict.fromkeys(name for record in records for name in _single(record.details))
    columns = dict.fromkeys([*case, *_SAMPLED, *counted, *details, *_ORIGIN])
    return pd.DataFrame([_row(record) for record in records], columns=list(columns))


def _row(record: Record) -> dict[str, object]:
    median = statistics.median(record.seconds) if record.seconds else None
    flops = record.counted.get("flops")
    return {
        **_flat(record.case),
        "n": len(record.seconds),
        "median_s": median,
        "min_s": min(record.seconds, default=None),
        "spread": _spread(record.seconds),
        "gflops_per_s": flops / median / 1e9 if flops is not None and median else None,
        "peak_private_bytes": record.peak_private_bytes,
        **record.counted,
        **_single(record.details),
        **{name: getattr(record, name) for name in _ORIGIN if name != "machine"},
        "machine": machine_name(record.environment),
    }


def _spread(seconds: tuple[float, ...]) -> float | None:
    if len(seconds) < 2 or not (median := statistics.median(seconds)):
        return None
    lower, _, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return (upper - lower) / median


def _single(details: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the details that aren't series or mappings."""
    return {k: v for k, v in details.items() if v is None or isinstance(v, str | int | float)}


def _flat(fields: Mapping[str, JSON], prefix: str = "") -> dict[str, object]:
    """Return nested mappings as one, with dotted names; lists as tuples, to be grouped by."""
    flat: dict[str, object] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = tuple(value) if isinstance(value, list) else value
    return flat
