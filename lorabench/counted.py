"""A model and its adapters as numbers: what actions read, compute and keep.

The figures are those of :mod:`lorabench.cost`, which goes through every weight. A model repeats
itself in each block, so here weights that are alike are counted once and multiplied.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from lorabench.cost import RESIDUAL_BITS, Touches, Work, kept_bytes, predict_work, resident_bytes
from lorabench.geometry import Geometry, Target
from lorabench.plan import Load, Rebind
from lorabench.recipe import State
from lorabench.streams import Product, products_of


@dataclass(frozen=True)
class Counted:
    """A model and the adapters that are bound to it, alike weights counted together.

    Attributes
    ----------
    geometry
        The model: its tensors are loaded, and a forward has the product of each of its weights.
    touches
        What each bound role's adapter touches: see :func:`lorabench.cost.touches_of`.
    factor_bytes
        Bytes of all factors in their files; by default they are in bf16.
    """

    geometry: Geometry
    touches: Touches
    factor_bytes: int | None = None

    @cached_property
    def base_bytes(self) -> int:
        """Bytes of the base's tensors."""
        return sum(tensor.nbytes for tensor in self.geometry.tensors)

    @cached_property
    def blocks(self) -> int:
        """Number of the model's repeated blocks."""
        return self.geometry.blocks

    @cached_property
    def products(self) -> tuple[tuple[int, Product], ...]:
        """The products of a forward: how many are alike, and one of them."""
        alike: dict[object, list[Product]] = {}
        for product in products_of(self.geometry, self.touches):
            held = {role: _shape(targets) for role, targets in product.targets.items()}
            key = (product.weight.shape, product.weight.dtype, product.stream, *held.items())
            alike.setdefault(key, []).append(product)
        return tuple((len(products), products[0]) for products in alike.values())

    def load_work(self, state: State, restore: str) -> Work:
        """Return what a load takes: see :func:`lorabench.cost.predict_work`."""
        files = Work(file_bytes=self.base_bytes + self._factor_bytes)
        return files + self._work(Load(state), restore)

    def rebind_work(
        self, before: State, after: State, restore: str, imaged: Collection[State] = ()
    ) -> Work:
        """Return what a rebind takes: see :func:`lorabench.cost.predict_work`."""
        return self._work(Rebind(before, after, 0, None, critical=False), restore, imaged)

    def resident_bytes(
        self, restore: str, states: Collection[State], *, f32_products: bool = False
    ) -> int:
        """Return what is in memory beside what a restore keeps.

        See :func:`lorabench.cost.resident_bytes`.
        """
        distinct = {tuple(state): state for state in states}.values()  # strengths don't matter
        held = resident_bytes(
            self._examples,
            self.base_bytes,
            restore,
            distinct,
            factor_bytes=self._factor_bytes,
            f32_products=f32_products,
        )
        return held - kept_bytes(self._examples, restore, distinct)

    def kept_bytes(self, restore: str, states: Collection[State]) -> int:
        """Return the most that a restore keeps: see :func:`lorabench.cost.kept_bytes`."""
        if restore == "residual":
            return max((self._residual_bytes(state) for state in states), default=0)
        return sum(number * kept_bytes(kind, restore, states) for number, kind in self.kinds)

    @cached_property
    def kinds(self) -> tuple[tuple[int, Touches], ...]:
        """Of the touched weights: how many are alike, and what touches one of them."""
        by_weight: dict[str, dict[str, list[Target]]] = {}
        for role, targets in self.touches.items():
            for target in targets:
                mine = by_weight.setdefault(target.weight.name, {})
                mine.setdefault(role, []).append(target)
        alike: dict[object, list[dict[str, list[Target]]]] = {}
        for touched in by_weight.values():
            weight = next(iter(touched.values()))[0].weight
            held = {role: _shape(targets) for role, targets in touched.items()}
            alike.setdefault((weight.shape, weight.dtype, *held.items()), []).append(touched)
        none = {role: [] for role in self.touches}
        return tuple((len(kinds), none | kinds[0]) for kinds in alike.values())

    @cached_property
    def _examples(self) -> Touches:
        """One touched weight of each kind."""
        return {
            role: [target for _, kind in self.kinds for target in kind[role]]
            for role in self.touches
        }

    @cached_property
    def _factor_bytes(self) -> int:
        if self.factor_bytes is not None:
            return self.factor_bytes
        return 2 * sum(
            number * target.adapter_params
            for number, kind in self.kinds
            for targets in kind.values()
            for target in targets
        )

    def _work(self, action: Load | Rebind, restore: str, imaged: Collection[State] = ()) -> Work:
        total = Work()
        for number, kind in self.kinds:
            work = predict_work(action, kind, 0, restore, factor_bytes=0, imaged=imaged)
            total += Work(*(number * amount for amount in vars(work).values()))
        return total

    def _residual_bytes(self, state: State) -> int:
        def summed(bits: float) -> int:
            return sum(n * kept_bytes(kind, "residual", [state], bits) for n, kind in self.kinds)

        whole = summed(0.0)  # what is kept as it is; the others' number is what they add at a byte
        return whole + round((summed(8.0) - whole) * RESIDUAL_BITS / 8)


def _shape(targets: Iterable[Target]) -> tuple[tuple[int, range | None], ...]:
    return tuple((target.rank, target.some) for target in targets)
