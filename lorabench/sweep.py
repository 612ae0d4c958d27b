"""Weights on their way from one state to another, one after the other."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lorabench.checkpoint import Checkpoint
from lorabench.cost import Work
from lorabench.errors import AdapterError
from lorabench.fuse import Pair, Term
from lorabench.kernels import Scratch, one_nan
from lorabench.recipe import State
from lorabench.restore import Restore


class Sweep:
    """What a load or rebind does to each weight, and what it has found by then.

    Parameters
    ----------
    state
        Where the weights go.
    tensors
        The base's tensors by name, at base bits or with a state fused in.
    factors
        Each adapter's pairs, by the names of the weights that they touch.
    restore
        Fuses, and gives base bits back.
    image
        Where fused weights go, by name; None fuses them in place.
    """

    def __init__(
        self,
        state: State,
        tensors: Mapping[str, Tensor],
        factors: Mapping[str, Mapping[str, Pair]],
        restore: Restore,
        scratch: Scratch,
        image: dict[str, Tensor] | None = None,
    ) -> None:
        self.state = state
        self._tensors = tensors
        self._factors = factors
        self._restore = restore
        self._scratch = scratch
        self.image = image
        # Sums of fused weights, of all or of those that may hold a value that isn't finite.
        self._sums: dict[str, Tensor] = {}

    def unfuse(self, name: str, before: State) -> Work:
        """Give a weight that another state is, or may be, fused into its base bits back."""
        weight = self._tensors[name]
        with self._scratch.span("restore", weight.nbytes):
            return self._restore.restore(name, weight, self._terms(name, before))

    def fuse(self, name: str) -> Work:
        """Fuse the state into a weight that has base bits."""
        terms = self._terms(name, self.state)
        if not terms:
            return Work()
        weight, work = self._tensors[name], Work()
        if self.image is not None:
            with self._scratch.span("copy", weight.nbytes):
                weight = self.image[name] = weight.clone()
            work = Work(snapshot_bytes=weight.nbytes)
        work += self._restore.fuse(name, weight, terms)
        # One read of a weight that is still in cache; a value that isn't finite makes the sum so.
        total = weight.sum()
        if weight.device.type == "cpu":  # asking a GPU now would mean waiting for it
            if total.isfinite():
                return work
            one_nan(weight)
        self._sums[name] = total
        return work

    def check_finite(self, base: Checkpoint) -> None:
        """Raise :class:`AdapterError` if fusing made infinity or NaN of a value that was finite."""
        for name in not_finite(self._sums):
            if self.image is None:
                before, after = base.read(name), self._tensors[name]
            else:
                before, after = self._tensors[name], self.image[name]
            overflown = before.cpu().isfinite() & ~after.cpu().isfinite()
            if count := int(overflown.sum()):
                raise AdapterError(
                    f"{base.path}: weight '{name}': {count:,} values overflow in state "
                    f"'{self.state}'; lower the strength, or check the adapter"
                )

    def _terms(self, name: str, state: State) -> list[Term]:
        return [
            Term(self._factors[role][name], strength)
            for role, strength in state.items()
            if name in self._factors[role]
        ]


def not_finite(sums: Mapping[str, Tensor]) -> list[str]:
    """Name what has a sum that isn't finite, waiting for a GPU once for each dtype."""
    found = []
    for dtype in {total.dtype for total in sums.values()}:
        names = [name for name, total in sums.items() if total.dtype == dtype]
        finite = torch.stack([sums[name] for name in names]).isfinite().tolist()
        found += [name for name, ok in zip(names, finite, strict=True) if not ok]
    return found
