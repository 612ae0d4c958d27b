"""What the command ``advise`` says to people: a plan, and what it was held against."""

import textwrap
from collections import Counter
from collections.abc import Callable

from lorabench.breakeven import NOTHING
from lorabench.layout import WIDTH, Fact, facts, table
from lorabench.plan import STRATEGY_VALUES
from lorabench.plan_text import Fields, actions_text, duration, fold, gib, timeline_text

_AMOUNTS: dict[str, Callable[[float], str]] = {"memory": gib, "idle": duration}
"""How to tell an amount of a parameter; of others a whole number."""


def advice_text(fields: Fields) -> str:
    """Say what `lorabench.advised.describe_advice` found."""
    grouped = fold(fields["advised"]["actions"], _together(fields))
    parts = [
        facts(_asked(fields)),
        "Advised\n" + facts(_verdict(fields)),
        "Why\n" + "\n".join(map(_bullet, _why(fields))),
        "Its actions, and what each takes, predicted\n" + actions_text(grouped),
        timeline_text(grouped),
        "Held against the named strategies: what renders wait for binding, predicted\n"
        + _named_table(fields),
        "Where the answer changes\n" + _changes(fields),
        "What these figures are\n" + "\n".join(_bullet(line) for line in fields["limits"]),
    ]
    return "\n\n".join(parts)


def _asked(fields: Fields) -> list[Fact]:
    machine = fields["machine"]
    rows: list[Fact] = [("recipe", fields["recipe"], "")]
    for role, adapter in fields["adapters"].items():
        rows.append((role, _adapter(adapter), ""))
    if not fields["adapters"]:
        rows.append(("adapters", "none", ""))
    free = f"{gib(fields['memory_bytes'])} for weights"
    if fields["host_bytes"] is not None:
        free += f", and {gib(fields['host_bytes'])} of the host's"
    rows += [
        ("model", fields["geometry"], ""),
        ("renders", _asked_renders(fields), ""),
        ("memory", free, ""),
        ("machine", f"{machine['name']}: {machine['title']}, weights on {machine['device']}", ""),
        ("its figures", _origins(machine), ""),
    ]
    if fields["only"]:
        only = ", ".join(f"{name}={'/'.join(values)}" for name, values in fields["only"].items())
        rows.append(("only", only, ""))
    return rows


def _origins(machine: Fields) -> str:
    """Tell where a machine's figures are from: how many of each provenance."""
    figures = machine["figures"].values()
    counts = Counter(figure["provenance"] for figure in figures)
    told = ", ".join(f"{count} {provenance}" for provenance, count in counts.items())
    if ceilings := sum(figure["ceiling"] for figure in figures):
        told += f"; {ceilings} are peaks, so that real times are longer"
    return f"{told}; --json has the source of each"


def _adapter(adapter: Fields) -> str:
    ranks = list(adapter["ranks"])
    told = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[-1]} to {ranks[0]}"
    where = adapter["path"] or "assumed"
    return f"x {adapter['strength']:g}, {told} on {adapter['targets']:,} targets, {where}"


def _asked_renders(fields: Fields) -> str:
    told = str(fields["renders"])
    if fields["batch"] is not None:
        told += f", at most {fields['batch']} through a phase together"
    if fields["idle_seconds"]:
        told += f", {duration(fields['idle_seconds'])} idle after each render or batch"
    return told


def _verdict(fields: Fields) -> list[Fact]:
    best = fields["advised"]
    strategy = best["strategy"]
    changed = [f"{f}={strategy[f]}" for f, v in STRATEGY_VALUES.items() if strategy[f] != v[0]]
    waited = {name.replace("_", " "): s for name, s in best["waited_seconds"].items()}
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in waited.items() if seconds)
    rows: list[Fact] = [
        ("plan", best["summary"], ""),
        ("as a strategy", ", ".join(changed) or "the defaults", ""),
        ("waits", f"{duration(best['binding_seconds'])} for binding, predicted ({parts})", ""),
    ]
    if forwards := best["critical_seconds"] - best["binding_seconds"]:
        share = best["binding_seconds"] / best["critical_seconds"]
        beside = f"{duration(forwards)} of forwards, in which no attention is counted"
        rows.append(("of all waits", f"{_percent(share)}, beside {beside}", ""))
    rows.append(("first render", duration(best["first_render_seconds"]), ""))
    if best["later_render_seconds"] is not None:
        rows.append(("each later one", duration(best["later_render_seconds"]), ""))
    rows.append(("memory", f"{_memory(best)}; file read with the page cache {best['cache']}", ""))
    if best["hidden_rebinds"]:
        needed = duration(best["idle_needed_seconds"])
        hidden = f"{best['hidden_rebinds']}; an idle time of {needed} after renders hides each"
        rows.append(("hidden rebinds", hidden, ""))
    if other := fields["cheapest_one_by_one"]:
        waits = f"{duration(other['binding_seconds'])}, {_memory(other)}"
        rows.append(("one by one", f"{other['summary']}: {waits}", ""))
    return rows


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "under 0.1%"


def _named_table(fields: Fields) -> str:
    best = fields["advised"]
    chosen = {"advised": best} | dict(
        sorted(fields["named"].items(), key=lambda named: named[1]["binding_seconds"])
    )
    rows = []
    for name, choice in chosen.items():
        later, wait = choice["later_render_seconds"], choice["binding_seconds"]
        times = wait / best["binding_seconds"] if best["binding_seconds"] else None
        rows.append(
            (
                name,
                duration(choice["first_render_seconds"]),
                "-" if later is None else duration(later),
                duration(wait),
                "-" if times is None else f"{times:.2f}" if times < 100 else f"{times:,.0f}",
                _memory(choice),
                "yes" if choice is best else _fits(choice, fields),
            )
        )
    header = (
        "strategy",
        "first",
        "a later",
        f"all {fields['renders']}",
        "times",
        "memory",
        "may be",
    )
    lines = table(header, rows, right=range(1, 5))
    told = list(fields["unpriced"])
    if missing := fields["not_priced"]:
        told.insert(0, f"not priced, for want of a figure: {', '.join(missing)}")
    return "\n".join((lines, *map(_bullet, told)))


def _fits(choice: Fields, fields: Fields) -> str:
    if not choice["fits"]:
        return "too large"
    if any(choice["strategy"][field] not in may for field, may in fields["only"].items()):
        return "ruled out"
    return "yes" if choice["exact"] or "restore" in fields["only"] else "not exact"


def _memory(choice: Fields) -> str:
    host = f" + {gib(choice['host_bytes'])} host" if choice["host_bytes"] else ""
    return gib(choice["device_bytes"]) + host


def _why(fields: Fields) -> list[str]:
    considered, runner_up = fields["considered"], fields["runner_up"]
    fit = considered["fit"]
    many = (
        f"the cheapest of {fit} ways of binding that fit" if fit > 1 else "the only way that fits"
    )
    if considered["too_large"]:
        many += f"; {considered['too_large']} don't"
    if runner_up and (margin := runner_up["margin"]):
        share = f"{margin:.1%} more" if margin < 1 else f"{1 + margin:,.3g} times as long"
        many += f"; the runner-up, '{runner_up['label']}', takes {share}"
    return [many, *fields["why"]]


def _changes(fields: Fields) -> str:
    """Say along each parameter what is the cheapest from where on."""
    along: dict[str, str] = {}
    for change in fields["changes"]:
        parameter = change["parameter"]
        at = _AMOUNTS.get(parameter, "{:,.0f}".format)(change["at"])
        along.setdefault(parameter, f"{parameter}: {_quoted(change['before'])}")
        along[parameter] += f", from {at} on {_quoted(change['after'])}"
    return "\n".join(map(_bullet, along.values())) or _bullet("nowhere near what was asked")


def _quoted(answer: str) -> str:
    return answer if answer == NOTHING else f"'{answer}'"


def _together(fields: Fields) -> int:
    if fields["advised"]["strategy"]["order"] == "render_major":
        return 1
    return fields["batch"] or fields["renders"]


def _bullet(line: str) -> str:
    return textwrap.fill(f"- {line}", WIDTH, initial_indent="  ", subsequent_indent="    ")
