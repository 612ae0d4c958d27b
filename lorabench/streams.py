"""Which tokens each weight works on in a forward, and how much arithmetic that is.

A forward multiplies each weight by the rows of one stream: the video's tokens, the audio's or the
prompt's. Which one is data, table ``[streams]`` of a model's template; a model without such rules
has one stream, and it is the video's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from lorabench.cost import Touches, Work, predict_work
from lorabench.errors import ConfigError, did_you_mean
from lorabench.geometry import Geometry, Target, TensorSpec, geometry_names, load_geometry
from lorabench.plan import STRATEGY_VALUES, Rebind
from lorabench.recipe import BASE, State

STREAMS = ("video", "audio", "text")

Tokens = Mapping[str, int]
"""Tokens of a forward by stream, as :attr:`lorabench.recipe.Phase.tokens` gives them; a stream that
isn't in it has none."""


class Stream(NamedTuple):
    """Whose rows a weight multiplies, and the stream without which it isn't used."""

    rows: str
    needs: str

    def tokens(self, tokens: Tokens) -> int:
        """Return the number of rows in a forward."""
        return tokens.get(self.rows, 0) if tokens.get(self.needs, 0) else 0


def streams_of(geometry: Geometry) -> dict[str, Stream]:
    """Return the stream that each module's weight works on.

    The rules are those of the geometry's template. A checkpoint comes without: it has those of the
    shipped template that it is named after, or that has all its modules.

    Raises
    ------
    ConfigError
        A rule names what is no stream.
    """
    rules = [(pattern, _stream(geometry, pattern, text)) for pattern, text in _rules(geometry)]
    return {
        module: next(
            (stream for pattern, stream in rules if fnmatchcase(module, pattern)),
            Stream("video", "video"),
        )
        for module in _modules(geometry)
    }


def _rules(geometry: Geometry) -> tuple[tuple[str, str], ...]:
    if geometry.streams:
        return geometry.streams
    modules = set(_modules(geometry))
    for template in map(load_geometry, geometry_names()):
        if template.name == geometry.name or modules <= set(_modules(template)):
            return template.streams
    return ()


def _modules(geometry: Geometry) -> list[str]:
    return [geometry.module(weight.name) for weight in geometry.weights]


def _stream(geometry: Geometry, pattern: str, text: str) -> Stream:
    rows, condition, needs = text.partition(" if ")
    stream = Stream(rows, needs if condition else rows)
    for name in stream:
        if name not in STREAMS:
            raise ConfigError(
                f"geometry '{geometry.name}': [streams] '{pattern}' = '{text}': '{name}' is no "
                f"stream{did_you_mean(name, STREAMS)}; write one of {', '.join(STREAMS)}, or two "
                f"as in 'text if video'"
            )
    return stream


@dataclass(frozen=True)
class Product:
    """A weight's product in a forward: y ``[tokens, out]`` = x ``[tokens, in]`` @ W.T."""

    weight: TensorSpec
    stream: Stream
    targets: Mapping[str, tuple[Target, ...]] = field(default_factory=dict)
    """What each adapter holds for the weight."""

    @property
    def name(self) -> str:
        """The weight's name."""
        return self.weight.name

    @property
    def out(self) -> int:
        """Rows of the weight."""
        return self.weight.shape[0]

    @property
    def in_(self) -> int:
        """Columns of the weight."""
        return self.weight.shape[1]

    @property
    def elements(self) -> int:
        """Multiply-accumulates of a token."""
        return self.weight.params


def products_of(geometry: Geometry, touches: Touches | None = None) -> tuple[Product, ...]:
    """Return the products of a forward in its order: the globals, then block by block.

    They are those of `Geometry.weights`; what adapters hold for others, and for biases, is left
    out. Globals that a forward comes to last, as an output projection, are among the first here.

    Parameters
    ----------
    touches
        The adapters by role; by default there are none.
    """
    held: dict[str, dict[str, tuple[Target, ...]]] = {}
    for role, targets in (touches or {}).items():
        for target in targets:
            mine = held.setdefault(target.weight.name, {})
            mine[role] = (*mine.get(role, ()), target)
    streams = streams_of(geometry)

    def block(weight: TensorSpec) -> int:
        number = geometry.block_of(weight.name)
        return -1 if number is None else number

    return tuple(
        Product(weight, streams[geometry.module(weight.name)], held.get(weight.name, {}))
        for weight in sorted(geometry.weights, key=block)
    )


@dataclass(frozen=True)
class ForwardWork:
    """What a forward does, in whole numbers."""

    products: int = 0
    """Weights that were multiplied."""
    flops: int = 0
    """Of y = x @ W.T; one multiply-accumulate is two."""
    weight_bytes: int = 0
    """Of those weights."""
    apply: Work = field(default_factory=Work)
    """What applying a state takes on top: the products (x @ A.T) @ B.T at ``runtime``; copies of
    weights and fuses into them ``per_layer``."""

    def __add__(self, other: "ForwardWork") -> "ForwardWork":
        return ForwardWork(
            self.products + other.products,
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.apply + other.apply,
        )


def forward_work(
    products: Sequence[Product], tokens: Tokens, state: State = BASE, apply: str = "resident"
) -> ForwardWork:
    """Return what a forward does.

    Parameters
    ----------
    apply
        How the state comes to bear: a value of :attr:`lorabench.plan.Strategy.apply`.

    Raises
    ------
    ConfigError
        There is no such way, or the tokens aren't whole numbers of known streams.
    """
    check_forward(tokens, apply)
    used = [(product, n) for product in products if (n := product.stream.tokens(tokens))]
    touches = {
        role: tuple(target for product, _ in used for target in product.targets.get(role, ()))
        for role in state
    }
    work = Work()
    if apply == "runtime":
        held = (
            (n, t) for product, n in used for role in state for t in product.targets.get(role, ())
        )
        work = Work(flops=sum(2 * n * target.adapter_params for n, target in held))
    elif apply == "per_layer":  # the state's weights are copied and fused, as an image of it is
        work = predict_work(Rebind(BASE, state, 0, None, critical=True), touches, 0, "images")
    return ForwardWork(
        len(used),
        sum(2 * n * product.elements for product, n in used),
        sum(product.weight.nbytes for product, _ in used),
        work,
    )


def check_forward(tokens: Tokens, apply: str) -> None:
    """Raise :class:`ConfigError` unless there is such a way of applying and such tokens."""
    ways = STRATEGY_VALUES["apply"]
    if apply not in ways:
        raise ConfigError(f"apply '{apply}'{did_you_mean(apply, ways)}: expected {', '.join(ways)}")
    for stream, number in tokens.items():
        if stream not in STREAMS:
            raise ConfigError(
                f"tokens of '{stream}'{did_you_mean(stream, STREAMS)}: expected those of "
                f"{', '.join(STREAMS)}"
            )
        if type(number) is not int or number < 0:
            raise ConfigError(
                f"tokens of '{stream}': expected a whole number, 0 or more, found {number!r}"
            )
