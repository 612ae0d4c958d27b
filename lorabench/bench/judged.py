"""What measured restores come to: each one judged by the yardsticks of its own process."""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from lorabench.records import Record

if TYPE_CHECKING:
    import pandas as pd

_WEIGHED = (
    "ratio",
    "kept_bytes",
    "entropy_bits",
    "entropy_given_exponent",
    "wrong_share",
    "predicted_bytes",
)


def restores_frame(records: Iterable[Record]) -> "pd.DataFrame":
    """Judge each restore by what was measured in its own process: a row a case.

    Columns ``restore``, ``strength``, ``ratio`` (the deltas' spread over the weights'); seconds, as
    medians: ``load_s``, ``fuse_s``, ``rebind_s``, ``unfuse_s``, ``plain_fuse_s``, ``copy_s``,
    ``digest_s``, and ``first_fuse_s`` of the first round; ``kept_bytes``, ``bits`` (kept, a touched
    weight), ``entropy_bits``, ``entropy_given_exponent``, ``wrong_share``, ``predicted_bytes``,
    ``measured_bytes`` (the peak beyond what the process had before), ``memory_error`` (of the
    prediction); ``unfuse_over_fuse`` (the kernel's alone) and ``bandwidth_share`` (of a plain
    copy's, in an unfuse), as medians over the rounds; ``digest_over_pass``; ``provenance``.
    """
    import pandas as pd

    cases: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in records:
        if (case := record.case)["bench"] == "restores":
            key = tuple(str(case[name]) for name in ("files", "device", "restore", "strength"))
            cases.setdefault(key, {})[str(case["contender"])] = record
    return pd.DataFrame([_judge(found) for found in cases.values()])


def _judge(found: Mapping[str, Record]) -> dict[str, Any]:
    load = found["load"]
    weighed = cast("dict[str, Any]", load.details)
    seconds = {name: record.seconds for name, record in found.items()}
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}

    def over(what: str, yardstick: str) -> float:
        return statistics.median(
            mine / its for mine, its in zip(seconds[what], seconds[yardstick], strict=True)
        )

    # A GPU's memory is its own; what is private to the process is beside it.
    measured = weighed.get("peak_device_bytes")
    if measured is None:
        assert load.peak_private_bytes is not None
        measured = load.peak_private_bytes - weighed["baseline_private_bytes"]
    return {
        "restore": load.case["restore"],
        "strength": load.case["strength"],
        **{f"{name.replace(' ', '_')}_s": median for name, median in medians.items()},
        "first_fuse_s": found["fuse"].warmup_seconds[0],
        **{name: weighed.get(name) for name in _WEIGHED},
        "bits": 8 * weighed["kept_bytes"] / weighed["touched_params"],
        "measured_bytes": measured,
        "unfuse_over_fuse": over("unfuse", "plain fuse"),
        "bandwidth_share": over("copy", "unfuse"),
        "digest_over_pass": medians["digest"] / medians["plain fuse"],
        # What is too small to be seen beside what the process had before has no error.
        "memory_error": weighed["predicted_bytes"] / measured - 1 if measured > 0 else math.nan,
        "provenance": load.provenance,
    }


def accounts_frame(records: Iterable[Record]) -> "pd.DataFrame":
    """List where the time of each operation under each restore went.

    Columns ``restore``, ``strength``, ``operation``, ``part`` (an operation of
    `lorabench.account.OPERATIONS`, or ``other``: what no span covers), ``seconds``, ``nbytes``,
    ``flops``, ``provenance``.
    """
    import pandas as pd

    rows = []
    for record in records:
        if record.case["bench"] != "restores" or "account" not in record.details:
            continue
        details = cast("dict[str, Any]", record.details)
        booked = [
            {"part": row["operation"], **{n: row[n] for n in ("seconds", "nbytes", "flops")}}
            for row in details["account"]
        ]
        rest = details["accounted_seconds"] - sum(row["seconds"] for row in booked)
        booked.append({"part": "other", "seconds": max(0.0, rest), "nbytes": 0, "flops": 0})
        case = record.case
        names = {"operation": case["contender"], **{n: case[n] for n in ("restore", "strength")}}
        rows += [{**names, **row, "provenance": record.provenance} for row in booked]
    return pd.DataFrame(rows)
