"""The command ``lorabench advise``: the cheapest way to bind a recipe's adapters, predicted."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lorabench.cli_options import (
    IN_SCRATCH,
    AllowSkip,
    AllowUnmatched,
    MachineName,
    RecipeName,
    Scratch,
)
from lorabench.cli_options import Device as DeviceName
from lorabench.cli_say import say
from lorabench.errors import ConfigError

if TYPE_CHECKING:
    from lorabench.arguments import Binding
    from lorabench.geometry import Geometry, Target

MOST_RENDERS = 200  # beyond, a plan repeats, and listing and varying it takes minutes


class Cache(StrEnum):
    """Where a base's file is read from."""

    auto = "auto"
    warm = "warm"
    cold = "cold"


def advise(
    recipe: RecipeName,
    renders: Annotated[
        int, typer.Option(metavar="N", min=1, max=MOST_RENDERS, help="How many renders.")
    ] = 10,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="For weights, where they live: 64GiB, 80GB or bytes; by default the machine's.",
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Of the host, where that is apart from a GPU's; by default the machine's.",
        ),
    ] = None,
    machine: MachineName = "here",
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            metavar="ROLE[=PATH[=STRENGTH]]",
            help="Bind an adapter: a file, whose headers tell what it touches, or one of the "
            "geometry's rank on every target. Without any, the required roles are bound.",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Of adapters without a file; else the geometry's."),
    ] = None,
    geometry: Annotated[
        str, typer.Option(metavar="NAME_OR_PATH", help="As for the command geometry.")
    ] = "ltx-2.5-22b",
    idle: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            max=1e6,
            help="From the end of a render or batch to the next, as while a video is decoded.",
        ),
    ] = 0.0,
    batch: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="How many renders may go through a phase together; all."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE[/VALUE]",
            help="What a field of the strategy may be; repeatable. Others are free.",
        ),
    ] = None,
    cache: Annotated[
        Cache,
        typer.Option(help="Read the base from the page cache, the disk, or as memory allows."),
    ] = Cache.auto,
    allow_unmatched: AllowUnmatched = False,
    allow_skip: AllowSkip = False,
    device: Annotated[
        DeviceName | None,
        typer.Option(help="Where weights live on this machine; by default the CPU."),
    ] = None,
    scratch: Scratch = IN_SCRATCH,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of text for people.")
    ] = False,
) -> None:
    """Find the cheapest way to bind a recipe's adapters: a plan, its price, and what it beats.

    All seconds are predicted, from the machine's rates and the headers of files.
    """
    from lorabench.advised import describe_advice
    from lorabench.advised_text import advice_text
    from lorabench.arguments import (
        find_geometry,
        find_machine,
        parse_bindings,
        parse_bytes,
        parse_only,
    )
    from lorabench.breakeven import changes
    from lorabench.planner import advise as find_advice
    from lorabench.recipe import load_recipe
    from lorabench.setting import Pricings, Setting

    loaded = load_recipe(recipe)
    bindings = parse_bindings(adapters or (r.name for r in loaded.roles if r.required))
    bound = loaded.bind({role: binding.strength for role, binding in bindings.items()})
    free = None if memory is None else parse_bytes(memory, "--memory")
    hosts = None if host_memory is None else parse_bytes(host_memory, "--host-memory")
    allowed = parse_only(only or ())
    model = find_geometry(geometry, rank=rank)
    touched = _touched(bindings, model, allow_unmatched=allow_unmatched, allow_skip=allow_skip)
    if machine != "here" and device is not None:
        raise ConfigError(
            f"--device {device.value}: a machine's file tells where weights live; leave it out, or "
            f"take --machine here"
        )
    where = find_machine(machine, scratch, (device or DeviceName.cpu).value)
    if machine == "here":
        say(f"note: the figures are those of this machine's calibration, {where.name}", err=True)
    if hosts is not None and where.host_bytes is None:
        raise ConfigError(
            f"--host-memory {host_memory}: on machine '{where.name}' weights live in the host's "
            f"memory; give --memory alone"
        )
    setting = Setting(
        bound, renders, where.memory_bytes if free is None else free, hosts, idle, batch, allowed
    )
    pricings = Pricings(where, model, touched.touches, touched.factor_bytes, cache.value)
    advice = find_advice(setting, pricings)
    fields = describe_advice(advice, pricings, touched.told, changes(setting, pricings))
    if as_json:
        typer.echo(json.dumps(fields, indent=2, allow_nan=False))
    else:
        say(advice_text(fields))


@dataclass(frozen=True)
class _Touched:
    """What adapters touch, their bytes, and what is told of each."""

    touches: "Mapping[str, Sequence[Target]]"
    factor_bytes: int
    told: Mapping[str, Mapping[str, Any]]


def _touched(
    bindings: "Mapping[str, Binding]",
    model: "Geometry",
    *,
    allow_unmatched: bool,
    allow_skip: bool,
) -> _Touched:
    """Read the headers of adapters' files; without a file, one touches every target."""
    from lorabench.adapter import Adapter
    from lorabench.inspected import left_out_text

    touches: dict[str, Sequence[Target]] = {}
    told: dict[str, Mapping[str, Any]] = {}
    factor_bytes = 0
    for role, binding in bindings.items():
        if binding.path is None:
            targets = model.targets
            factor_bytes += 2 * sum(target.adapter_params for target in targets)
        else:
            adapter = Adapter.open(
                binding.path,
                model.tensors,
                allow_unmatched=allow_unmatched,
                allow_skip=allow_skip,
            )
            if left_out := left_out_text(adapter):
                say(left_out, err=True)
            targets = adapter.targets
            factor_bytes += adapter.factor_bytes
        touches[role] = targets
        ranks = Counter(target.rank for target in targets)
        told[role] = {
            "strength": binding.strength,
            "path": None if binding.path is None else str(binding.path),
            "targets": len(targets),
            "ranks": {str(rank): ranks[rank] for rank in sorted(ranks, reverse=True)},
        }
    return _Touched(touches, factor_bytes, told)
