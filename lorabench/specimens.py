"""Weights of real shapes, in a file and in memory, and two adapters that touch them all.

The adapters differ in rank alone, so that what a fuse takes for its FLOP can be told from the rest.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor

from lorabench.checkpoint import Checkpoint, write_checkpoint
from lorabench.fuse import Pair
from lorabench.geometry import TensorSpec
from lorabench.recipe import State

Shape = tuple[int, int]

# Of LTX-2.5: attentions, and a half of each of a feed-forward's, in about their shares of the FLOP.
SHAPES: dict[str, tuple[Shape, ...]] = {
    "large": (*[(4096, 4096)] * 3, (8192, 4096), (2048, 16384)),
    "medium": (*[(2048, 2048)] * 6, (2048, 4096), (4096, 2048)),
    "small": (*[(32, 4096)] * 6, *[(32, 2048)] * 6, (128, 4096), (4096, 128), (2048, 256)),
}
"""Weights ``(out, in)`` by class."""

MORE, LESS = State(more=1.0), State(less=1.0)
"""States of two adapters that touch the same, at the larger and at the smaller rank."""

TINY = (8, 64)
"""A weight that takes next to nothing but a launch."""

STD, RATIO = 0.02, 0.05
"""Spread of weights, and of deltas beside theirs."""


@dataclass(frozen=True)
class Sizes:
    """How much a calibration measures."""

    shapes: Mapping[str, Sequence[Shape]] = field(default_factory=lambda: SHAPES)
    """By class; the large ones that have the first one's shape are coded, too."""
    ranks: tuple[int, int] = (450, 32)
    """The larger and the smaller one; of a weight no larger than its sides allow."""
    tokens: tuple[int, int] = (256, 64)
    launches: int = 64
    """Tiny weights, which tell what a launch takes."""
    rounds: tuple[int, int] = (3, 12)
    """At least, and at most."""
    seconds: float = 26.0
    """What the rounds may take if there are enough of them; a first one isn't counted."""
    sample_seconds: float = 0.15
    """Of the scalar loop, which gets the first rows of a weight."""

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, in bf16."""
        return 2 * sum(out * in_ for shapes in self.shapes.values() for out, in_ in shapes)


class Specimens:
    """The weights by class, on a device at base bits, and the factors that go with them.

    Parameters
    ----------
    folder
        Where the base's file goes, and stays. Tiny weights aren't in it.

    Attributes
    ----------
    groups
        Names of weights by class, and those of ``tiny`` ones.
    factors
        Pairs by adapter, ``more`` and ``less``, and weight.
    coded
        The large weights that have the first one's shape.
    """

    def __init__(self, device: torch.device, folder: Path, sizes: Sizes) -> None:
        specs = {
            size: [TensorSpec(f"{size}.{i}", shape, "BF16") for i, shape in enumerate(shapes)]
            for size, shapes in sizes.shapes.items()
        }
        every = [spec for mine in specs.values() for spec in mine]
        self.values = _Values(max(spec.params for spec in every) + len(every))
        path = folder / "calibration.safetensors"
        write_checkpoint(path, every, lambda spec: self.values(spec.shape))
        self.base = Checkpoint.open(path)
        self.groups = {size: [spec.name for spec in mine] for size, mine in specs.items()}
        self.groups["tiny"] = [f"tiny.{i}" for i in range(sizes.launches)]
        self.tensors = {spec.name: self.base.read(spec.name).to(device) for spec in every}
        self.tensors |= {name: self.values(TINY).to(device) for name in self.groups["tiny"]}
        self.factors: dict[str, dict[str, tuple[Pair, ...]]] = {"more": {}, "less": {}}
        for name, weight in self.tensors.items():
            for role, pair in self._pairs(weight, sizes.ranks).items():
                self.factors[role][name] = (pair,)
        first, *others = specs["large"]
        same = [spec.name for spec in others if spec.shape == first.shape]
        self.coded = [first.name, *same]

    def ranks(self, names: Iterable[str], role: str) -> str:
        """Tell the ranks of an adapter at weights."""
        found = sorted({len(self.factors[role][name][0].factors[0]) for name in names})
        return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"

    def _pairs(self, weight: Tensor, ranks: tuple[int, int]) -> dict[str, Pair]:
        out, in_ = weight.shape
        rank = min(ranks[0], out, in_)
        a, b = self.values((rank, in_)), self.values((out, rank))
        pairs = {}
        for role, r in {"more": rank, "less": max(1, min(ranks[1], rank // 4))}.items():
            scale = RATIO / (STD * sqrt(r))  # a value of B @ A sums r products of two
            b_r = b[:, :r].contiguous()
            pairs[role] = Pair(a[:r].to(weight.device), b_r.to(weight.device), scale)
        return pairs


class _Values:
    """Seeded normal values: made once, and given to each tensor from another place on."""

    def __init__(self, most: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._pool = torch.empty(most, dtype=torch.bfloat16).normal_(0, STD, generator=generator)
        self._taken = 0

    def __call__(self, shape: Sequence[int]) -> Tensor:
        out, in_ = shape
        self._taken = (self._taken + 1) % (len(self._pool) - out * in_ + 1)
        return self._pool[self._taken :][: out * in_].clone().view(out, in_)
