"""What commands measure on, and how they measure it and tell what was recorded."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lorabench.cli_options import Device
from lorabench.cli_say import say
from lorabench.errors import ConfigError, UnavailableError, did_you_mean

if TYPE_CHECKING:
    from lorabench.arguments import Binding
    from lorabench.bench import Case, Subject
    from lorabench.records import Record


def walk_cases(
    recipe: str,
    strategies: Sequence[str],
    renders: int,
    size: str | None,
    base: Path | None,
    adapters: Sequence[str] | None,
    device: Device,
    scratch: Path,
    out: Path,
    *,
    streamed: bool = False,
) -> "list[Case]":
    """Make the cases of a recipe's walks; what can't be meant or done is refused first."""
    import torch

    from lorabench.arguments import parse_bindings
    from lorabench.bench import walk_case
    from lorabench.kernels import get_kernel
    from lorabench.plan import parse_strategy
    from lorabench.recipe import load_recipe
    from lorabench.restore import check_restore
    from lorabench.streamed import check_streamed

    wanted = load_recipe(recipe)
    parsed = {name: parse_strategy(name) for name in strategies}
    required = [role.name for role in wanted.roles if role.required]
    bindings = parse_bindings(adapters or required)
    wanted.bind(dict.fromkeys(bindings, 1.0))  # a mistake shows before weights are written
    for how in parsed.values():
        if streamed:
            check_streamed(how.kernel, how.restore)
        else:
            check_restore(how.restore, torch.device(device.value))
            get_kernel(how.kernel, torch.device(device.value))
    subject = find_subject(size, base, bindings, device, scratch, out, held=not streamed)
    return [
        walk_case(subject, wanted, how, name, renders, streamed=streamed)
        for name, how in parsed.items()
    ]


def one_binding(adapters: Sequence[str] | None) -> "tuple[str, dict[str, Binding]]":
    """Read the one adapter that a command measures, by its role."""
    from lorabench.arguments import parse_bindings

    bindings = parse_bindings(adapters or ["distilled"])
    if len(bindings) != 1:
        raise ConfigError(f"--adapter: expected one, found {', '.join(bindings)}; measure in turn")
    return next(iter(bindings)), bindings


def find_subject(
    size: str | None,
    base: Path | None,
    bindings: "Mapping[str, Binding]",
    device: Device,
    scratch: Path,
    out: Path,
    *,
    held: bool = True,
) -> "Subject":
    """Find or write the weights to measure on; what can't be meant is refused before that.

    ``held`` says that they will be held in memory, and so have to fit.
    """
    import torch

    from lorabench.arguments import check_records_file, check_size
    from lorabench.bench import Subject
    from lorabench.inspected import left_out_text
    from lorabench.synthetic import sample_weights

    if device == Device.cuda and not torch.cuda.is_available():
        raise UnavailableError(f"--device cuda: torch {torch.__version__} finds no CUDA GPU")
    if base is not None and size is not None:
        raise ConfigError(f"--base {base} and --size {size}: give one of the two")
    for role, binding in bindings.items():
        if binding.strength != 1:
            raise ConfigError(
                f"--adapter {role}: a strength is for the command plan; adapters are measured at 1"
            )
        if base is not None and binding.path is None:
            raise ConfigError(f"--adapter {role}: with --base, expected role=path")
        if base is None and binding.path is not None:
            raise ConfigError(f"--adapter {role}={binding.path}: a path needs --base")
    if base is not None:
        paths = {role: b.path for role, b in bindings.items() if b.path is not None}
        subject = Subject(base, paths, device.value)
        _, opened = subject.open()
        for adapter in opened.values():
            if told := left_out_text(adapter):
                say(told, err=True)
        check_records_file(out)
        return subject
    check_size(size := size or "tiny")
    check_records_file(out)
    files = sample_weights(scratch, size, list(bindings), held=held)
    return Subject(files.base, files.adapters, device.value)


def find_contenders(
    asked: Sequence[str] | None, usual: Sequence[str], others: Iterable[str], device: Device
) -> Sequence[str]:
    """Check the contenders asked for; without any, take those of the usual that run here."""
    from lorabench.kernels import KERNELS
    from lorabench.peers import PEERS

    known = dict.fromkeys((*usual, *KERNELS, *others))
    for name in asked or ():
        if name not in known:
            raise ConfigError(
                f"--contender {name}{did_you_mean(name, known)}: choose from {', '.join(known)}"
            )
    if asked:
        return asked
    missing = [name for name in usual if name in PEERS and not PEERS[name].here]
    if device != Device.cpu and "scalar" in usual:
        missing.append("scalar")
    if missing:
        typer.echo(f"note: measured without {' and '.join(missing)}, not available here", err=True)
    return [name for name in usual if name not in missing]


def measure(cases: Sequence["Case"], out: Path, as_json: bool) -> "Sequence[Record]":
    """Measure cases and print what was recorded of them."""
    from lorabench import records
    from lorabench.bench import sweep
    from lorabench.tables import records_text

    held = records.read(out) if out.exists() else []
    found = sweep(cases, out)
    if repeated := sum(record in held for record in found):
        typer.echo(
            f"note: {repeated} of {len(found)} records were in {out} before and weren't measured "
            f"again; give another --out for that",
            err=True,
        )
    if as_json:
        for record in found:
            typer.echo(json.dumps({"schema": records.SCHEMA, **asdict(record)}, allow_nan=False))
    else:
        typer.echo(records_text(found))
    return found
