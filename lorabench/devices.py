"""Devices by their names, and the memory that is free on them."""

import torch

from lorabench.errors import UnavailableError
from lorabench.machine import available_bytes


def find_device(device: torch.device | str) -> torch.device:
    """Return a device by its name, if there is one.

    Raises
    ------
    UnavailableError
        It is neither the CPU nor a CUDA GPU of this machine.
    """
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise UnavailableError(f"device '{device}' is not supported; choose 'cpu' or 'cuda'")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise UnavailableError(
            f"device '{device}' was asked for, but torch {torch.__version__} finds "
            f"{torch.cuda.device_count() or 'no'} CUDA GPU"
        )
    return found


def free_bytes(device: torch.device) -> int | None:
    """Return free memory on a device, in bytes; None where the system doesn't say."""
    if device.type != "cuda":
        return available_bytes()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def check_room(what: str, device: torch.device, nbytes: int) -> None:
    """Raise :class:`UnavailableError` if a device has less free memory than something needs."""
    free = free_bytes(device)
    if free is not None and nbytes > free:
        raise UnavailableError(
            f"{what} needs {nbytes:,} bytes of memory on '{device}', {free:,} are free; use fewer "
            f"blocks or another restore"
        )


def touch_free(device: torch.device, nbytes: int) -> int:
    """Touch free memory of the CPU and give it back, before what takes that much is timed.

    A virtual machine is given memory by its host when it touches it, and may have to return what
    was free for some seconds: the first touch then takes several times as long as a later one. How
    much of that a time holds is up to what ran before. On a GPU there is nothing to be done.

    Returns
    -------
    The bytes that were touched: no more than there are.
    """
    if device.type != "cpu":
        return 0
    free = free_bytes(device)
    nbytes = max(0, nbytes if free is None else min(nbytes, free))
    torch.empty(nbytes, dtype=torch.uint8).fill_(1)
    return nbytes
