"""What commands say to people: aligned text, no wider than 100 columns."""

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lorabench.arithmetic import show
from lorabench.claims import VERDICTS
from lorabench.cost import Work
from lorabench.layout import (
    Fact,
    bytes_fact,
    facts,
    histogram,
    scaled,
    share,
    table,
    wrapped,
)
from lorabench.measure import Samples
from lorabench.plan import STRATEGY_VALUES
from lorabench.recipe import State
from lorabench.records import Record


def geometry_text(fields: Mapping[str, Any]) -> str:
    """Say what `describe_geometry` found."""
    touched = fields["touched_params"]
    rows: list[Fact] = [
        ("tensors", fields["tensors"], ""),
        ("parameters", fields["params"], ""),
        bytes_fact("tensor bytes", fields["tensor_bytes"]),
        ("targets", fields["targets"], "weights that an adapter may touch"),
        ("touched parameters", touched, share(touched, fields["params"])),
    ]
    if fields["ranks"] is None:
        rows.append(("adapter", "no rank is known; give one with --rank", ""))
    else:
        work = f"{scaled(2 * fields['macs'], 'FLOP')} per pass"
        rows += [
            ("adapter parameters", fields["adapter_params"], ""),
            bytes_fact("adapter tensor bytes", fields["adapter_tensor_bytes"]),
            ("multiply-accumulates", fields["macs"], work),
            ("adapter ranks", histogram(fields["ranks"]), ""),
        ]
    return f"{fields['name']}, {fields['blocks']} blocks\n{facts(rows)}"


def synth_text(fields: Mapping[str, Any], *, dry_run: bool) -> str:
    """Say which files were written, or would be."""
    head = "a dry run; nothing is written" if dry_run else "written"
    files = [
        (
            file["path"],
            f"{file['tensors']:,}",
            f"{file['tensor_bytes']:,}",
            scaled(file["tensor_bytes"], "B"),
        )
        for file in (fields["base"], *fields["adapters"].values())
    ]
    lines = table(("file", "tensors", "tensor bytes", ""), files, right=(1, 2, 3))
    blocks, rank = fields["blocks"], fields["rank"]
    return f"{fields['geometry']}, {blocks} blocks, adapter rank {rank}: {head}\n\n{lines}"


def plan_text(fields: Mapping[str, Any]) -> str:
    """Say what `describe_plan` found: a plan line by line, with the work of each action."""
    actions = fields["actions"]
    works = [Work(**work) for work in fields["work"]]
    rows = []
    for number, (action, work) in enumerate(zip(actions, works, strict=True)):
        rows.append(
            (
                str(number),
                str(action.get("render", "")),
                "-" if (phase := action.get("phase", "")) is None else str(phase),
                action["kind"],
                _state(State(action["from"])) if "from" in action else "",
                _state(State(action["to"] if "to" in action else action["state"])),
                "yes" if action["critical"] else "no",
                *_work_cells(work),
            )
        )
    # titles of two lines, so that two states of two adapters each still fit the width
    header = ("#", "render", "phase", "action", "from", "to", "critical", "TFLOP")
    header = (*header, "file\nGB", "snapshot\nGB")
    strategy = ", ".join(f"{name}={value}" for name, value in fields["strategy"].items())
    roles = fields["roles"].items()
    head: list[Fact] = [
        ("recipe", fields["recipe"], ""),
        ("bound", ", ".join(f"{role} x {s}" for role, s in roles) or "no adapter", ""),
        ("strategy", strategy, ""),
        ("renders", str(fields["renders"]), ""),
        ("actions", histogram(Counter(action["kind"] for action in actions)), ""),
    ]
    total = sum(works, Work())
    read, copied = scaled(total.file_bytes, "B"), scaled(total.snapshot_bytes, "B")
    work = f"{scaled(total.flops, 'FLOP')}, {read} from files, {copied} from and to snapshots"
    model = f"{fields['geometry']}, each adapter of rank {fields['rank']} on every target"
    head += [("in all", work, ""), ("predicted for", model, "")]
    return f"{facts(head)}\n\n{table(header, rows, right=(0, 1, 2, 7, 8, 9))}"


def recipes_text(recipes: Iterable[Mapping[str, Any]]) -> str:
    """List recipes with their phases' states; an optional role is in brackets."""
    rows = []
    for recipe in recipes:
        roles = recipe["roles"].items()
        phases = (_state(State(state), indent=3) for state in recipe["phases"])
        rows.append(
            (
                "\n".join((recipe["name"], *(f"= {alias}" for alias in recipe["aliases"]))),
                "\n".join(name if need == "required" else f"[{name}]" for name, need in roles),
                "\n".join(f"{number}: {state}" for number, state in enumerate(phases)),
                textwrap.fill(recipe["description"], 36),
            )
        )
    lines = table(("recipe", "roles", "phases", "description"), rows)
    return f"{lines}\n\nA role in brackets is optional: unless bound, it drops out of every phase."


def strategies_text(strategies: Iterable[Mapping[str, str]]) -> str:
    """List the strategies, and what each of their fields may be."""
    presets = []
    for preset in strategies:
        changed = [field for field, values in STRATEGY_VALUES.items() if preset[field] != values[0]]
        fields = ", ".join(f"{field}={preset[field]}" for field in changed) or "the defaults"
        presets.append(
            (preset["name"], textwrap.fill(preset["note"], 44), textwrap.fill(fields, 36))
        )
    values = [(field, ", ".join(values)) for field, values in STRATEGY_VALUES.items()]
    return "\n\n".join(
        (
            table(("strategy", "what it does", "fields"), presets),
            table(("field", "values, the default first"), values),
            "A strategy is a preset, fields, or both: both_fixes,restore=host_snapshot",
        )
    )


def fused_text(fields: Mapping[str, Any]) -> str:
    """Say what a fuse to a file wrote, and how fast."""
    seconds, nbytes = fields["seconds"], fields["bytes"]
    rows: list[Fact] = [
        ("state", str(State(fields["state"])), ""),
        bytes_fact("bytes", nbytes),
        ("time", scaled(seconds, "s"), f"{scaled(fields['flops'] / seconds, 'FLOP')}/s"),
    ]
    if resumed := fields["resumed_bytes"]:
        rows.append(("of them", resumed, "had been written before the run was broken off"))
    return f"{fields['path']}: written\n{facts(rows)}"


def records_text(records: Iterable[Record]) -> str:
    """Say what records measured: median, spread, rate, peak memory, and how the check came out."""
    rows: list[Sequence[str]] = []
    titled = None
    for record in records:
        title, case = _case_cells(record.case)
        if title != titled:
            rows.append((titled := title, *[""] * 5))
        samples = Samples(record.seconds)
        flops, peak = record.counted.get("flops"), record.peak_private_bytes
        check = re.sub(r"\b([0-9a-f]{12})[0-9a-f]{20}\b", r"\1", record.check)  # a digest's head
        rows.append(
            (
                textwrap.fill(case, 34, initial_indent="  ", subsequent_indent="    "),
                scaled(samples.median, "s"),
                f"{samples.spread:.0%}" if len(record.seconds) > 1 else "-",
                f"{flops / samples.median / 1e9:.2f}" if flops else "-",
                "-" if peak is None else scaled(peak, "B"),
                textwrap.fill(check, 25),
            )
        )
    header = ("case", "median", "spread", "GFLOP/s", "peak", "check")
    return table(header, rows, right=(1, 2, 3, 4))


def claims_text(claims: Sequence[Mapping[str, Any]]) -> str:
    """List judged claims: what is told, what each check comes to, and what would explain it."""
    rows = []
    for claim in claims:
        origin = "; ".join(filter(None, (claim["source"], claim["hardware"])))
        says = (claim["id"], f"  {claim['says']}", f"  ({origin})")
        figures = [_told(claim)] if claim["value"] is not None or claim["at_least"] else []
        for check in claim["checks"]:
            figures += _check_lines(check, share=claim["value"] is not None)
        if claim["verdict"] == "open":
            figures.append(f"needs {claim['needs']}")
        rows.append((claim["verdict"], wrapped(says, 34), wrapped(figures, 50)))
    counts = Counter(claim["verdict"] for claim in claims)
    counted = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    return f"{table(('verdict', 'claim', 'figures'), rows)}\n\n{len(claims)} claims: {counted}"


def _told(claim: Mapping[str, Any]) -> str:
    if claim["value"] is None:
        return f"told: at least {show(claim['at_least'])} {claim['unit']}"
    return f"told: {show(claim['value'])} {claim['unit']}"


def _check_lines(check: Mapping[str, Any], *, share: bool) -> list[str]:
    """Say what a check came to; how far it is from the claim, if a ``share`` of that says much."""
    if check["inside"] is None:
        return [f"{check['kind']}: no record yet of {check['how']}"]
    where = f" on {check['machine']}" if check["machine"] else ""
    line = f"{check['kind']}{where}: {show(check['figure'])}"
    if share and abs(check["difference"] or 0) > 1e-9:  # more than a float's rounding
        line += f" ({100 * check['difference']:+.3g} %)"
    if not check["inside"]:
        factor = f"a factor of {1 + check['within']:.3g}"
        band = factor if check["kind"] == "measured" else f"{100 * check['within']:.3g} %"
        line += f", not within {band}" if check["within"] else ", not equal"
    lines = [line, f"  {check['how']}"]
    if not check["formula"].isidentifier():
        lines.append(f"  {check['arithmetic']}")
    if not check["inside"] and check["reading"]:
        lines += [f"  reading: {check['reading']}", f"  {check['reading_arithmetic']}"]
    return lines


def _state(state: State, indent: int = 0) -> str:
    """Return a state with a line for each adapter."""
    return str(state).replace(" + ", "\n" + " " * indent + "+ ")


def _work_cells(work: Work) -> tuple[str, str, str]:
    amounts = (work.flops / 1e12, work.file_bytes / 1e9, work.snapshot_bytes / 1e9)
    flops, file, snapshot = (f"{a:.2f}" if a >= 0.1 else f"{a:.1g}" if a else "" for a in amounts)
    return flops, file, snapshot


def _case_cells(case: Mapping[str, Any]) -> tuple[str, str]:
    """Return what several records share, and what tells them apart."""
    if case["bench"] in ("walk", "stream"):
        title = ", ".join((case["recipe"], *case["strategy"].split(",")))
        before = f"{case['before']} -> " if "before" in case else ""
        return textwrap.fill(title, 34), f"{case['action']} {before}{case['state']}"
    if case["bench"] in _CELLS:
        title, cell = _CELLS[case["bench"]]
        return textwrap.fill(title.format_map(case), 34), cell.format_map(case)
    rows = f", {case['rows']} rows" if "rows" in case else ""
    return textwrap.fill(case["module"], 34), f"{case.get('contender', 'scalar loop')}{rows}"


_CELLS = {
    "fuse": ("{geometry}, {blocks} blocks", "{contender}"),
    "load": ("{restore}, page cache {cache}, {geometry}, {blocks} blocks", "{contender}"),
    "peers": (
        "{threads} threads, {mix}, {geometry}, {blocks} blocks",
        "{contender} {operation}, {pass}",
    ),
    "rules": ("rules of rounding, side {side}", "strength {strength:g}, ratio {ratio:g}"),
    "restores": ("{restore}, strength {strength:g}, {geometry}, {blocks} blocks", "{contender}"),
    "denoise": (
        "one forward, {state}, {geometry}, {blocks} blocks",
        "{apply}, {tokens} tokens of each stream",
    ),
    "drift": ("drift, {subject}", "{way}, {dtype}, ratio {ratio:.2g}"),
}
"""What the records of a bench share, and what tells them apart."""
