"""Which way of binding adapters to phases is the cheapest for a recipe on a machine."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from lorabench.bill import Bill, price_plan
from lorabench.errors import UnavailableError
from lorabench.plan import STRATEGIES, STRATEGY_VALUES, Action, Strategy, loaded_state, plan
from lorabench.pricing import Memory
from lorabench.routes import Value, actions_of, value_of
from lorabench.setting import Pricings, Setting
from lorabench.ways import Candidate, candidates, cheapest, courses, fits


@dataclass(frozen=True)
class Choice:
    """A priced plan.

    Attributes
    ----------
    strategy
        The point of the strategy space that the plan is, or is nearest to: ``load`` tells the
        loaded state, and ``leave`` whether any batch's end makes ready for the next.
    cold
        Whether the base's file was taken to come from the disk.
    """

    strategy: Strategy
    actions: tuple[Action, ...]
    bill: Bill
    memory: Memory
    cold: bool

    @cached_property
    def value(self) -> Value:
        """What choices are compared by."""
        return value_of(self.bill)


@dataclass(frozen=True)
class Advice:
    """The cheapest plan, and what it was chosen from.

    Attributes
    ----------
    limits
        The memory there is: of the device, and of a host's apart from it.
    choices, too_large
        The best plan of every way of binding, the cheapest first: those that fit, and the others.
    named
        Every preset that can be priced, by name, whether or not it fits or is allowed.
    unpriced
        What would have been looked at, but for a figure that the machine's file doesn't have.
    """

    setting: Setting
    limits: Memory
    choices: tuple[Choice, ...]
    too_large: tuple[Choice, ...]
    named: Mapping[str, Choice]
    unpriced: tuple[str, ...]

    @property
    def best(self) -> Choice:
        """The cheapest that fits."""
        return self.choices[0]

    @property
    def runner_up(self) -> Choice | None:
        """The cheapest of the others that fit."""
        return self.choices[1] if len(self.choices) > 1 else None

    def fits(self, choice: Choice) -> bool:
        """Whether a plan's memory is within the limits."""
        return fits(choice.memory, self.limits)


def advise(setting: Setting, pricings: Pricings) -> Advice:
    """Find the cheapest plan.

    Every way of binding has its best plan: the state that load leaves, and at the end of every
    render or batch whether the weights go to another state, and to which. These plans are compared
    by what renders wait for binding, then by what binding takes in all, then by memory, then by how
    near they are to a strategy's defaults.

    Raises
    ------
    UnavailableError
        Nothing that is allowed can be priced, or fits.
    """
    ways = courses(setting, pricings)
    found = candidates(ways, setting)
    limits = pricings.limits(setting)
    unpriced = tuple(dict.fromkeys(problem for way in ways for problem in way.unpriced))
    if cheapest(found, limits) is None:
        raise UnavailableError(_nothing(found, setting, limits, unpriced))
    chosen = [_chosen(candidate, setting) for candidate in found]
    return Advice(
        setting,
        limits,
        choices=tuple(choice for choice in chosen if fits(choice.memory, limits)),
        too_large=tuple(choice for choice in chosen if not fits(choice.memory, limits)),
        named=dict(_named(setting, pricings)),
        unpriced=unpriced,
    )


def label(choice: Choice | Candidate) -> str:
    """Return a few words for a plan: ``images, by phase``, ``snapshot, ready for next``."""
    strategy = choice.strategy
    value = choice.value if isinstance(choice, Choice) else choice.route.value
    if strategy.apply != "resident":
        words = [strategy.apply.replace("_", " ")]
    elif not value.rebinds:
        words = ["no rebind"]
    else:
        words = [strategy.restore.replace("host_", "").replace("_", " ")]
        words += ["by phase"] if strategy.order == "phase_major" else []
        words += ["ready for next"] if value.made_ready else []
        words += ["overlapped"] if strategy.overlap != "none" else []
    words += [strategy.kernel] if strategy.kernel != STRATEGY_VALUES["kernel"][0] else []
    return ", ".join(words)


def _chosen(candidate: Candidate, setting: Setting) -> Choice:
    course, strategy, route = candidate
    recipe = setting.recipe
    actions = actions_of(route, recipe, strategy, setting.renders, setting.batch)
    bill = price_plan(actions, recipe, strategy, course.pricing, idle_seconds=setting.idle_seconds)
    return Choice(strategy, actions, bill, course.memory, course.pricing.cold)


def _named(setting: Setting, pricings: Pricings) -> Iterator[tuple[str, Choice]]:
    recipe = setting.recipe
    for name, strategy in STRATEGIES.items():
        if strategy.kernel not in pricings.machine.kernels:
            continue
        actions = plan(recipe, strategy, setting.renders, setting.batch)
        loaded = loaded_state(recipe, strategy.load)
        states = [loaded, *(phase.state for phase in recipe.phases)]
        pricing, memory = pricings.held(setting, strategy, states)
        try:
            bill = price_plan(actions, recipe, strategy, pricing, idle_seconds=setting.idle_seconds)
        except UnavailableError:
            continue  # which is told in `Advice.unpriced`
        yield name, Choice(strategy, actions, bill, memory, pricing.cold)


def _nothing(
    found: tuple[Candidate, ...], setting: Setting, limits: Memory, unpriced: tuple[str, ...]
) -> str:
    """Say why there is no advice, and what to do about that."""
    if not found:
        allowed = "; ".join(f"{name}: {', '.join(may)}" for name, may in setting.only.items())
        reasons = [*unpriced] or [
            f"of what strategies may be ({allowed or 'anything'}), nothing goes together on this "
            f"machine; device_snapshot takes a CUDA machine, and overlap goes with neither images "
            f"nor unfused adapters; allow more"
        ]
        return "no way of binding can be priced: " + "; ".join(reasons)
    least = min(found, key=lambda candidate: _lacking(candidate.memory, limits))
    return (
        f"no way of binding fits in {_told(limits, limits)}: the one that needs least, "
        f"'{label(least)}', takes {_told(least.memory, limits)}; give it that much, bind fewer "
        f"adapters or such of a lower rank, or take a smaller base"
    )


def _lacking(memory: Memory, limits: Memory) -> tuple[int, int]:
    beyond = (max(0, held - limit) for held, limit in zip(memory, limits, strict=True))
    return sum(beyond), sum(memory)


def _told(memory: Memory, limits: Memory) -> str:
    device = f"{memory.device_bytes / 2**30:.2f} GiB"
    if not limits.host_bytes:
        return device
    return f"{device} of the device's memory and {memory.host_bytes / 2**30:.2f} GiB of the host's"
