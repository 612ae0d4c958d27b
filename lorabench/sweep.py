"""Weights on their way from one state to another, one after the other."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite

import torch
from torch import Tensor

from lorabench.checkpoint import Checkpoint
from lorabench.cost import Work
from lorabench.errors import AdapterError
from lorabench.fuse import Pair, as_matrix, by_rows, terms_of
from lorabench.kernels import Scratch, finite_if_all, one_nan
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
        factors: Mapping[str, Mapping[str, Sequence[Pair]]],
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
        # A number for each fused weight, or for those that may hold a value that isn't finite.
        self._seen: dict[str, Tensor] = {}

    def keep(self, name: str) -> Work:
        """Take note of a weight's base bits, which it has just been given."""
        return self._restore.keep(name, as_matrix(self._tensors[name]))

    def unfuse(self, name: str, before: State) -> Work:
        """Give a weight that another state is, or may be, fused into its base bits back."""
        weight = as_matrix(self._tensors[name])
        with self._scratch.span("restore", weight.nbytes):
            return self._restore.restore(name, weight, terms_of(name, before, self._factors))

    def fuse(self, name: str) -> Work:
        """Fuse the state into a weight that has base bits."""
        terms = terms_of(name, self.state, self._factors)
        if not terms:
            return Work()
        weight, work = self._tensors[name], Work()
        if self.image is not None:
            with self._scratch.span("copy", weight.nbytes):
                weight = self.image[name] = weight.clone()
            work = Work(snapshot_bytes=weight.nbytes)
        weight = as_matrix(weight)
        work += self._restore.fuse(name, weight, terms)
        seen = finite_if_all(weight)  # it is still in cache
        if weight.device.type == "cpu":  # asking a GPU now would mean waiting for it
            if seen.isfinite():
                return work
            for rows, _ in by_rows(terms):
                one_nan(weight[rows.start : rows.stop])
        self._seen[name] = seen
        return work

    def check_finite(self, base: Checkpoint) -> None:
        """Raise :class:`AdapterError` if fusing made infinity or NaN of a value that was finite."""
        for name, number in zip(self._seen, numbers(self._seen.values()), strict=True):
            if isfinite(number):
                continue
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


def numbers(tensors: Iterable[Tensor]) -> list[float]:
    """Return the values of tensors of one element, waiting for a GPU once."""
    listed = list(tensors)
    return torch.stack(listed).tolist() if listed else []
