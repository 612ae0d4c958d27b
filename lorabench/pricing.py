"""What actions take on a machine, in seconds: its rates times what the actions do.

Everything here is a prediction, by arithmetic on headers, recipes and rates alone.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from lorabench.cost import Work
from lorabench.counted import Counted
from lorabench.errors import ConfigError, UnavailableError
from lorabench.geometry import Geometry
from lorabench.rates import Machine, Pace
from lorabench.recipe import BASE, Phase, State
from lorabench.tallies import (
    Tallies,
    factors_of,
    flops_of,
    forward_of,
    fuse_of,
    params_of,
    per_layer_of,
)


@dataclass(frozen=True)
class Cost:
    """What an action does and takes, whoever waits for it."""

    work: Work
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds by part, one after another: ``read``, ``keep``, ``restore``, ``image``, ``fuse``,
    ``forward`` and, for adapters that aren't fused, ``apply``."""
    transfer_seconds: float = 0.0
    """Of a rebind's seconds, what the processor only waits for: a disk, or the link to a GPU."""
    disk_bytes: int = 0
    """Read from the disk; what the page cache gives is the host's."""
    host_bytes: int = 0
    """Read from or written to the host's memory."""
    link_bytes: int = 0
    """Over the link to a GPU with memory of its own."""
    device_bytes: int = 0
    """Read from or written to the memory that the weights live in."""

    @cached_property
    def seconds(self) -> float:
        """Seconds in all."""
        return sum(self.parts.values())


class Memory(NamedTuple):
    """What weights, factors, scratch memory and kept bits take at most; no activations."""

    device_bytes: int
    host_bytes: int
    """In a host's memory apart from the device's; 0 where there is none."""


_Asked = ParamSpec("_Asked")
_Given = TypeVar("_Given")


def _remembered(
    price: Callable[Concatenate["Pricing", _Asked], _Given],
) -> Callable[Concatenate["Pricing", _Asked], _Given]:
    """Work a price out once: a plan asks for the same few in every render."""

    @functools.wraps(price)
    def remembered(self: "Pricing", *args: _Asked.args, **kwargs: _Asked.kwargs) -> _Given:
        key = (price.__name__, args, *kwargs.items())
        if key not in self._prices:
            self._prices[key] = price(self, *args, **kwargs)
        return self._prices[key]

    return remembered


@dataclass(frozen=True)
class Pricing:
    """Prices actions on a machine under a kernel.

    Attributes
    ----------
    counted
        The model and the adapters bound to it.
    cold
        Whether the base's file comes from the disk, rather than from the page cache.

    Raises
    ------
    ConfigError
        The machine has no figures of that kernel.
    UnavailableError
        A price takes a figure that the machine's file doesn't have.
    """

    machine: Machine
    kernel: str
    counted: Counted
    cold: bool = False

    def __post_init__(self) -> None:
        if self.kernel not in self.machine.kernels:
            known = ", ".join(self.machine.kernels)
            raise ConfigError(
                f"machine '{self.machine.name}' has no figures of kernel '{self.kernel}'; it has "
                f"those of {known}"
            )

    @property
    def geometry(self) -> Geometry:
        """The model."""
        return self.counted.geometry

    @_remembered
    def load(self, state: State, restore: str, apply: str = "resident") -> Cost:
        """Price a load, which reads ahead of what it fuses; ``state`` is the base's under others.

        Reading, and keeping and fusing what was read, go on at once: the longer is waited for. But
        where a CPU does all of it, what reading takes of it comes on top.
        """
        if apply != "resident":
            restore = "reread"  # nothing is ever to be restored, so that nothing is kept
        work = self.counted.load_work(state, restore)
        rate = self._rate("load_warm")
        if self.cold:
            rate = min(rate, self._rate("read_cold"))
        read = work.file_bytes / rate
        parts = self._fuse_parts(state, restore)
        if restore.endswith("_snapshot"):
            linked = restore == "host_snapshot" and self._apart
            kept = self._rate("copy_host" if linked else "copy_new")
            parts = {"keep": work.snapshot_bytes / kept, **parts}
        if restore == "images" and state:
            parts = {"image": work.snapshot_bytes / self._rate("copy_new"), **parts}
        busy = sum(parts.values())
        ahead = max(0.0, read - busy)
        if busy and self.machine.load_beside is not None:
            ahead = max(ahead, min(read, work.file_bytes / self.machine.load_beside))
        return self._cost(work, {"read": ahead, **parts}, restore)

    @_remembered
    def rebind(self, before: State, after: State, restore: str, *, imaged: bool = False) -> Cost:
        """Price a rebind; ``imaged`` says that ``after`` has an image, which only ``images`` asks.

        A sweep restores a weight, then fuses it, then goes on to the next.
        """
        work = self.counted.rebind_work(before, after, restore, [after] if imaged else [])
        if restore == "images":
            parts: dict[str, float] = {}
            if after and not imaged:
                copied = work.snapshot_bytes / self._rate("copy_new")
                parts = {"image": copied, **self._fuse_parts(after, restore)}
            return self._cost(work, parts, restore)
        parts, waited = self._restore_parts(before, restore)
        return self._cost(work, parts | self._fuse_parts(after, restore), restore, waited)

    @_remembered
    def denoise(self, phase: Phase, apply: str = "resident") -> Cost:
        """Price a phase's forwards: every target's product, without attention.

        Unless ``apply`` is ``resident``, the part ``apply`` is what the state's adapters add; it
        isn't known of a phase that tells no tokens.
        """
        tokens, state = phase.tokens, phase.state
        forward = forward_of(self.counted, tokens)
        if apply != "resident" and state and not forward:
            raise UnavailableError(
                f"a phase in state '{state}' tells no tokens, so that what adapters add to its "
                f"forwards isn't known; give it video_tokens or audio_tokens"
            )
        flops, moved = flops_of(forward), 2 * params_of(forward)
        seconds = {"forward": self._forward_seconds(phase)}
        if apply == "runtime":
            factors = factors_of(self.counted, tokens, state)
            seconds["apply"] = self._paced(factors, self.machine.forward)
            flops, moved = flops + flops_of(factors), moved + 2 * params_of(factors)
        elif apply == "per_layer":
            fused, copied_bytes = per_layer_of(self.counted, tokens, state)
            rate = self._rate("copy_host" if self.machine.device == "cpu" else "copy_device")
            paces = self.machine.kernels[self.kernel]
            seconds["apply"] = copied_bytes / rate + self._paced(fused, paces)
            flops, moved = flops + flops_of(fused), moved + 2 * copied_bytes + 4 * params_of(fused)
        parts = {name: phase.forwards * part for name, part in seconds.items() if part}
        work = Work(flops=phase.forwards * flops)
        return Cost(work, parts, device_bytes=phase.forwards * moved)

    def exposed(self, rebind: Cost, phase: Phase) -> float:
        """Return what a render waits for an overlapped rebind, ahead of its phase's first forward.

        The processor does the rebind's work beside the forward's, so that they add up; a disk or a
        link works meanwhile. Before the forward begins, a block's share has to be there.
        """
        forward = self._forward_seconds(phase)
        busy = rebind.seconds - rebind.transfer_seconds
        beside = max(busy, rebind.transfer_seconds - forward)
        return min(rebind.seconds, beside + rebind.seconds / (1 + self.counted.blocks))

    def memory(self, states: Iterable[State], restore: str, apply: str = "resident") -> Memory:
        """Return the most memory that going through states takes."""
        return self._memory(frozenset(states), restore, apply)

    @_remembered
    def _memory(self, states: frozenset[State], restore: str, apply: str) -> Memory:
        f32_products = self.machine.device == "cpu"
        if apply != "resident":
            fused = states if apply == "per_layer" else frozenset[State]()
            held = self.counted.resident_bytes("reread", fused, f32_products=f32_products)
            roles = {role for state in fused for role in state}
            copied = (t.weight.nbytes for role in roles for t in self.counted.touches[role])
            return Memory(held + max(copied, default=0), 0)
        held = self.counted.resident_bytes(restore, states, f32_products=f32_products)
        kept = self.counted.kept_bytes(restore, states)
        if restore == "host_snapshot" and self._apart:
            return Memory(held, kept)
        return Memory(held + kept, 0)

    @property
    def _apart(self) -> bool:
        """Whether weights live in a memory that is apart from the host's."""
        return self.machine.host_bytes is not None

    @cached_property
    def _prices(self) -> dict[object, Any]:
        return {}

    @cached_property
    def _fuse_seconds(self) -> dict[str, float]:
        """What fusing each role's adapter takes."""
        paces = self.machine.kernels[self.kernel]
        return {
            role: self._paced(fuse_of(self.counted, role), paces) for role in self.counted.touches
        }

    def _cost(
        self, work: Work, parts: Mapping[str, float], restore: str, waited: float = 0.0
    ) -> Cost:
        on_device = restore == "device_snapshot" or (self._apart and restore == "images")
        hosted = 0 if on_device else work.snapshot_bytes
        return Cost(
            work,
            {name: seconds for name, seconds in parts.items() if seconds},
            waited,
            disk_bytes=work.file_bytes if self.cold else 0,
            host_bytes=(0 if self.cold else work.file_bytes) + hosted,
            link_bytes=work.file_bytes + hosted if self._apart else 0,
            device_bytes=work.file_bytes + work.snapshot_bytes + 4 * work.fused_params,
        )

    def _rate(self, name: str) -> float:
        rate = getattr(self.machine, name)
        if rate is None:
            raise UnavailableError(
                f"machine '{self.machine.name}' has no figure '{name}', which this takes; add it "
                f"to the machine's file, or calibrate"
            )
        return rate

    def _paced(self, tallies: Tallies, paces: Mapping[str, Pace]) -> float:
        return sum(
            t.products * self.machine.launch_seconds + paces[size].seconds(t.flops, t.params)
            for size, t in tallies.items()
        )

    def _fuse_parts(self, state: State, restore: str) -> dict[str, float]:
        seconds = sum(self._fuse_seconds[role] for role in state)
        if restore == "residual" and state:
            seconds += self._touched(state) / self._rate("encode")
        return {"fuse": seconds}

    def _restore_parts(self, state: State, restore: str) -> tuple[dict[str, float], float]:
        """Return what bringing the base's bits back takes, and what of it isn't the processor's."""
        if not state:
            return {}, 0.0
        if restore in ("subtract", "residual"):  # which find the deltas again
            seconds = sum(self._fuse_seconds[role] for role in state)
            if restore == "residual":
                seconds += self._touched(state) / self._rate("decode")
            return {"restore": seconds}, 0.0
        work = self.counted.rebind_work(state, BASE, restore)
        if restore == "reread":
            seconds = work.file_bytes / self._rate("read_cold" if self.cold else "read_warm")
            return {"restore": seconds}, seconds if self.cold or self._apart else 0.0
        hosted = restore == "host_snapshot"
        seconds = work.snapshot_bytes / self._rate("copy_host" if hosted else "copy_device")
        return {"restore": seconds}, seconds if hosted and self._apart else 0.0

    def _touched(self, state: State) -> int:
        return self.counted.rebind_work(BASE, state, "reread").fused_params

    @_remembered
    def _forward_seconds(self, phase: Phase) -> float:
        return self._paced(forward_of(self.counted, phase.tokens), self.machine.forward)
