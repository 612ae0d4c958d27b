"""The command ``lorabench calibrate``: measure this machine, and keep what was found."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorabench.cli_options import IN_SCRATCH, Device, OnDevice
from lorabench.cli_say import say

if TYPE_CHECKING:
    from lorabench.rates import Machine


def calibrate(
    device: OnDevice = Device.cpu,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where the figures go; by default machines/<this machine>.toml in FOLDER.",
        ),
    ] = None,
    scratch: Annotated[
        Path, typer.Option(metavar="FOLDER", help="On the disk that is to be measured.")
    ] = IN_SCRATCH,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace FILE, though it is no calibration of this machine."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure what this machine reads, copies, fuses and multiplies in a second.

    Takes about a minute, in which nothing else should run. The figures are what predictions are
    made of; each tells how it was measured.
    """
    import json

    from lorabench import calibrate as calibrating
    from lorabench.machine_text import describe_machine, machine_text

    path = out or calibrating.calibration_file(scratch, device.value)
    calibrating.check_out(path, device.value, overwrite=overwrite)
    machine: Machine = calibrating.calibrate(device.value, scratch)
    calibrating.store(machine, path)
    if as_json:
        typer.echo(json.dumps(describe_machine(machine), indent=2, allow_nan=False))
    else:
        say(f"{machine_text(describe_machine(machine))}\n\nwritten to {path}")
