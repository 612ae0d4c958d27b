"""A forward of the denoise stand-in in each way of applying a state, at several token counts.

Every stream has the same number of tokens, for what is asked is how a forward's seconds grow with
them. See :mod:`lorabench.forward` for what of a forward there is.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from torch import Tensor

from lorabench.bench.cases import Case, Result, Subject
from lorabench.bench.walk import Laps
from lorabench.check import check_against_reference, rows_to_check
from lorabench.digest import digest
from lorabench.errors import CheckError, ConfigError
from lorabench.forward import WAYS, Forward
from lorabench.fuse import Term
from lorabench.measure import Observer, Samples, time_once
from lorabench.recipe import BASE, State, bound_state
from lorabench.resident import ResidentWeights
from lorabench.streams import STREAMS, ForwardWork, check_forward, products_of

DENOISE_TOKENS = (64, 128, 256)

_BF16, _F32 = 2.0**-8, 2.0**-24  # the most that rounding a value once is off by, of its size
_SECOND_ORDER = 1.02  # what errors of errors add


def denoise_case(
    subject: Subject,
    state: Mapping[str, float] | None = None,
    applies: Sequence[str] = tuple(WAYS),
    tokens: Sequence[int] = DENOISE_TOKENS,
    rounds: int = 2,
) -> Case:
    """Time a forward in each way and at each token count, in turn; a record for each.

    The weights are held twice, at base bits and in the state.

    Parameters
    ----------
    state
        By default every adapter at strength 1.
    applies
        Values of :attr:`lorabench.plan.Strategy.apply`.
    tokens
        Of every stream.
    rounds
        How many, after a forward of each way at the fewest tokens, which is checked.

    Raises
    ------
    ConfigError
        An adapter that the subject doesn't have, no such way, or nothing to time.
    """
    ones = dict.fromkeys(subject.adapters, 1.0)
    wanted = bound_state(ones if state is None else state, subject.adapters)
    if not applies or not tokens or rounds < 1 or min(tokens) < 1:
        raise ConfigError(
            f"denoise: expected at least one way, round and number of tokens, found ways "
            f"{list(applies)}, {rounds} rounds and tokens {list(tokens)}"
        )
    for apply in applies:
        check_forward(_tokens(tokens[0]), apply)
    what = {
        "bench": "denoise",
        **subject.what(),
        "state": str(wanted),
        "applies": list(applies),
        "token_counts": list(tokens),
        "rounds": rounds,
    }
    return Case(what, _denoise, (subject, wanted, tuple(applies), tuple(tokens), rounds))


def _denoise(
    subject: Subject, state: State, applies: Sequence[str], tokens: Sequence[int], rounds: int
) -> Sequence[Result]:
    stand, geometry = _Stand(subject, state), subject.geometry()
    device = stand.weights.device
    fewest = min(tokens)
    cases = [(n, apply) for n in tokens for apply in applies]
    samples: dict[tuple[int, str], list[float]] = {case: [] for case in cases}
    laps: dict[tuple[int, str], list[Laps]] = {case: [] for case in cases}
    work: dict[tuple[int, str], ForwardWork] = {}
    with Observer() as observer:
        checked = {apply: stand.warm_up(fewest, apply) for apply in applies}
        for _ in range(rounds):
            for case in cases:
                n, apply = case
                stand.bind(apply)
                lap = Laps(geometry, device).start()
                seconds, work[case] = stand.run(n, apply, _after_product(lap))
                laps[case].append(lap)
                samples[case].append(seconds)
    stand.check_weights()
    seen = observer.observation
    return [
        Result(
            Samples(tuple(samples[n, apply]), (checked[apply].seconds,) if n == fewest else ()),
            check=f"at {fewest} tokens: {checked[apply].found}",
            what={"apply": apply, "tokens": n},
            counted=_counted(work[n, apply]),
            details={
                "globals_seconds": median(lap.globals_seconds for lap in laps[n, apply]),
                "block_seconds": median(lap.block_seconds for lap in laps[n, apply]),
                "others_cores": seen.others_cores,
            },
            peak_private_bytes=seen.peak_private_bytes,
        )
        for n, apply in cases
    ]


def _tokens(n: int) -> dict[str, int]:
    return dict.fromkeys(STREAMS, n)


def _after_product(laps: Laps) -> Callable[[str, Tensor], None]:
    return lambda name, y: laps(name)


def _counted(work: ForwardWork) -> dict[str, int | float]:
    return {
        "products": work.products,
        "flops": work.flops,
        "weight_bytes": work.weight_bytes,
        "apply_flops": work.apply.flops,
        "copied_bytes": work.apply.snapshot_bytes,
        "fused_params": work.apply.fused_params,
    }


class _Checked(NamedTuple):
    """A forward that was held against what it should give."""

    seconds: float  # with the check's own
    found: str


class _Stand:
    """Weights at base bits and in a state, and forwards over them."""

    def __init__(self, subject: Subject, state: State) -> None:
        base, adapters = subject.open()
        # Images switch between the base and the state without writing to either.
        self.weights = ResidentWeights(base, adapters, restore="images", device=subject.device)
        self.weights.load(BASE)
        self._state = state
        self._bits = self._digests()
        check_against_reference(self.weights)
        self._forward = Forward(self.weights, products_of(subject.geometry(), self.weights.touches))
        self._rows = rows_to_check(adapters)
        self._resident: dict[str, str] = {}  # digests of the resident weights' products

    def bind(self, apply: str) -> None:
        """Bring the weights to the state that a way of applying expects."""
        self.weights.rebind(self._state if apply == "resident" else BASE)

    def run(
        self, n: int, apply: str, after_product: Callable[[str, Tensor], None]
    ) -> tuple[float, ForwardWork]:
        """Return the seconds of a forward, and what it did."""
        work: list[ForwardWork] = []

        def forward() -> None:
            tokens = _tokens(n)
            work.append(self._forward.run(self._state, tokens, apply, after_product=after_product))

        return time_once(forward, self.weights.device), work[0]

    def warm_up(self, n: int, apply: str) -> _Checked:
        """Run a forward for the first time, and hold what comes out against what should.

        Per layer that are the bits of the resident weights' forward; else the exact products, for
        some rows of a few weights.
        """
        digests: dict[str, str] = {}
        some: dict[str, Tensor] = {}

        def keep(name: str, y: Tensor) -> None:
            digests[name] = digest({name: y})
            if rows := self._rows.get(name):
                some[name] = y[:, rows.start : rows.stop].clone()

        if apply == "per_layer" and not self._resident:
            self.warm_up(n, "resident")
        self.bind(apply)
        seconds, _ = self.run(n, apply, keep)
        if apply == "per_layer":
            for name, found in digests.items():
                if found != self._resident[name]:
                    raise CheckError(
                        f"'{name}' at {n} tokens: fused per layer, the product has other bits "
                        f"({found}) than of the resident weight ({self._resident[name]})"
                    )
            return _Checked(seconds, f"{len(digests)} products with resident bits")
        if apply == "resident":
            self._resident = digests
        for name, y in some.items():
            self._check_near(name, y, n, apply)
        return _Checked(seconds, f"{len(some)} products within their rounding")

    def _check_near(self, name: str, y: Tensor, n: int, apply: str) -> None:
        rows = self._rows[name]
        weight = self.weights.tensors[name][rows.start : rows.stop]
        terms = self._forward.terms(name, self._state) if apply == "runtime" else []
        exact, error = _exact(
            self._forward.input_of(n, weight.shape[1]), weight, [t.within(rows) for t in terms]
        )
        off = (y.double() - exact).abs() - error
        if not bool((off <= 0).all()):
            raise CheckError(
                f"'{name}' at {n} tokens: the {apply} product is off by {float(off.max()):g} more "
                f"than its roundings explain"
            )

    def check_weights(self) -> None:
        """Raise :class:`CheckError` if the weights' bits have changed."""
        if self._digests() != self._bits:
            raise CheckError(
                f"{self.weights.base.path}: forwards changed the weights that they multiplied"
            )

    def _digests(self) -> list[str]:
        found = []
        for state in (BASE, self._state):
            self.weights.rebind(state)
            found.append(self.weights.digest())
        return found


def _exact(x: Tensor, weight: Tensor, terms: Sequence[Term]) -> tuple[Tensor, Tensor]:
    """Return x @ (W + Σ s·B@A).T in f64, and how far a sum of rounded products may be off."""
    x = x.double()
    y, error = _product(x, weight)
    for term in terms:
        a, b, _, top = term.pair
        h, h_error = (x, 0 * x) if a is None else _product(x, a)
        delta, delta_error = _product(h, b)
        delta_error += h_error @ b.double().abs().T
        columns = slice(top, top + len(b))
        y[:, columns] += term.factor * delta
        error[:, columns] += abs(term.factor) * delta_error + _BF16 * y[:, columns].abs()
    return y, _SECOND_ORDER * error


def _product(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return x @ W.T, and how far one may be off that is summed in f32 and rounded to bf16."""
    wide = weight.double()
    y = x @ wide.T
    return y, _BF16 * y.abs() + wide.shape[1] * _F32 * (x.abs() @ wide.abs().T)
