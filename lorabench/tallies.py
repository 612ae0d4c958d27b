"""The products of fuses and forwards, tallied by the class of weight that sets their pace."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lorabench.counted import Counted
from lorabench.geometry import Target
from lorabench.rates import class_of
from lorabench.recipe import State
from lorabench.streams import Product, Tokens


@dataclass(frozen=True)
class Tally:
    """Products of one class, summed."""

    products: int = 0
    flops: int = 0
    params: int = 0
    """Of a fuse, the elements that get a delta; of a forward, the weights' elements."""

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.products + other.products, self.flops + other.flops, self.params + other.params
        )

    def __mul__(self, number: int) -> "Tally":
        return Tally(number * self.products, number * self.flops, number * self.params)


Tallies = Mapping[str, Tally]
"""By class of weight."""


def fuse_of(counted: Counted, role: str) -> Tallies:
    """Tally what fusing an adapter multiplies."""
    return _tallied(
        (number, _elements(target), _fuse(target))
        for number, kind in counted.kinds
        for target in kind[role]
    )


def forward_of(counted: Counted, tokens: Tokens) -> Tallies:
    """Tally what a forward multiplies."""
    return _tallied(
        (number, product.elements, Tally(1, 2 * rows * product.elements, product.elements))
        for number, product, rows in _used(counted, tokens)
    )


def factors_of(counted: Counted, tokens: Tokens, state: State) -> Tallies:
    """Tally what a state's factors multiply in a forward; a delta without factors is one product.

    Their class is that of the factor.
    """
    tallies = []
    for number, product, rows in _used(counted, tokens):
        for target in _held(product, state):
            sides = [_elements(target)]
            if target.rank:
                sides = [target.rank * target.columns, target.rank * len(target.rows)]
            tallies += [(number, side, Tally(1, 2 * rows * side, side)) for side in sides]
    return _tallied(tallies)


def per_layer_of(counted: Counted, tokens: Tokens, state: State) -> tuple[Tallies, int]:
    """Tally what a forward fuses into scratch, and count the bytes of weights copied for that."""
    fused, copied_bytes = [], 0
    for number, product, _ in _used(counted, tokens):
        held = _held(product, state)
        fused += [(number, _elements(target), _fuse(target)) for target in held]
        copied_bytes += number * product.weight.nbytes if held else 0
    return _tallied(fused), copied_bytes


def flops_of(tallies: Tallies) -> int:
    """Return the FLOP in all."""
    return sum(tally.flops for tally in tallies.values())


def params_of(tallies: Tallies) -> int:
    """Return the elements in all."""
    return sum(tally.params for tally in tallies.values())


def _used(counted: Counted, tokens: Tokens) -> list[tuple[int, Product, int]]:
    """Give the products that a forward has: how many are alike, one of them, its rows."""
    return [
        (number, product, rows)
        for number, product in counted.products
        if (rows := product.stream.tokens(tokens))
    ]


def _held(product: Product, state: State) -> list[Target]:
    return [target for role in state for target in product.targets.get(role, ())]


def _elements(target: Target) -> int:
    return len(target.rows) * target.columns


def _fuse(target: Target) -> Tally:
    return Tally(1, 2 * target.macs, _elements(target))


def _tallied(weights: Iterable[tuple[int, int, Tally]]) -> Tallies:
    """Sum by class what some weights are: how many, the elements of one, and its tally."""
    summed: dict[str, Tally] = {}
    for number, elements, tally in weights:
        size = class_of(elements)
        summed[size] = summed.get(size, Tally()) + tally * number
    return summed
