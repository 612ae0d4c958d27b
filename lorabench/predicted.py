"""What the cost model says of cases that were measured."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from lorabench.pricing import Pricing
from lorabench.recipe import BASE, Phase, State
from lorabench.records import Record

if TYPE_CHECKING:
    import pandas as pd

FREE_SECONDS = 1e-3
"""A case that takes less is left out, as a switch of images: there the model says nothing or 0."""

Found: TypeAlias = tuple[str, str, float]  # kind, what was done, seconds


def predict(records: Iterable[Record], pricing: Callable[[str], Pricing | None]) -> "pd.DataFrame":
    """Hold a machine's model against what was measured there.

    Walks, passes, ways back and forwards are predicted, resident and from the page cache, each from
    the machine's rates alone. Other benches measure what no plan does, or from the disk.

    Parameters
    ----------
    records
        Those of the machine; of other weights than the model's geometry none are taken.
    pricing
        Gives the model under a kernel, or None where the machine has no figures of it.

    Returns
    -------
    DataFrame
        A row for each case: ``kind`` (``load``, ``fuse``, ``restore``, ``rebind`` for the two
        together, ``forward``), ``case``, ``predicted_s``, ``measured_s`` (the median of samples),
        ``error`` (predicted over measured, less one), ``others_cores``, ``time``.
    """
    import pandas as pd

    rows = []
    for record in records:
        case = {"kernel": "gemm", **record.case}
        model = pricing(str(case["kernel"])) if case["bench"] in _PREDICTING else None
        if model is None or case["params"] != sum(t.params for t in model.geometry.tensors):
            continue
        found = _PREDICTING[str(case["bench"])](case, model)
        measured = statistics.median(record.seconds)
        if found is None or measured < FREE_SECONDS:
            continue
        kind, name, seconds = found
        rows.append(
            {
                "kind": kind,
                "case": name,
                "predicted_s": seconds,
                "measured_s": measured,
                "error": seconds / measured - 1,
                "others_cores": record.details.get("others_cores"),
                "time": record.time,
            }
        )
    return pd.DataFrame(rows)


def _walked(case: Mapping[str, Any], model: Pricing) -> Found | None:
    restore, after = case["restore"], State.parse(case["state"])
    if case["action"] == "load":
        cost = model.load(after, restore, case.get("apply", "resident"))
        return "load", f"load into {after}, {restore}", cost.seconds
    return _rebound(model, State.parse(case["before"]), after, restore)


def _passed(case: Mapping[str, Any], model: Pricing) -> Found | None:
    if case["contender"] != "pass":  # loads into memory that is in use, as a plan's never is
        return None
    return _rebound(model, BASE, State(dict.fromkeys(case["roles"], 1.0)), case["restore"])


def _restored(case: Mapping[str, Any], model: Pricing) -> Found | None:
    restore, strength = case["restore"], case["strength"]
    state, other = (State(dict.fromkeys(case["roles"], s * strength)) for s in (1.0, 0.8))
    ways = {
        "plain fuse": (BASE, state, "reread"),
        "fuse": (BASE, other, restore),
        "rebind": (other, state, restore),
        "unfuse": (state, BASE, restore),
    }
    if case["contender"] == "load":
        return "load", f"load into base, {restore}", model.load(BASE, restore).seconds
    if case["contender"] not in ways:
        return None
    return _rebound(model, *ways[case["contender"]])


def _forwarded(case: Mapping[str, Any], model: Pricing) -> Found | None:
    tokens, apply = case["tokens"], case["apply"]
    state = State.parse(case["state"])
    phase = Phase(state, 1, video_tokens=tokens, audio_tokens=tokens, text_tokens=tokens)
    return "forward", f"{apply}, {tokens} tokens", model.denoise(phase, apply).seconds


_PREDICTING: dict[str, Callable[[Mapping[str, Any], Pricing], Found | None]] = {
    "walk": _walked,
    "load": _passed,
    "restores": _restored,
    "denoise": _forwarded,
}


def _rebound(model: Pricing, before: State, after: State, restore: str) -> Found:
    kind = "rebind" if before and after else "restore" if before else "fuse"
    name = f"{before} to {after}, {restore}"
    return kind, name, model.rebind(before, after, restore).seconds
