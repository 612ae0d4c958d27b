"""The advised plan is the cheapest that fits: no search finds a cheaper one, and no preset is."""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_pricing import CPU, GEOMETRY, GPU, OUT, WEIGHT0, WEIGHT1

from lorabench.bill import price_plan
from lorabench.cost import Touches, touches_of
from lorabench.errors import ConfigError, UnavailableError
from lorabench.geometry import Target, load_geometry
from lorabench.plan import (
    STRATEGIES,
    STRATEGY_VALUES,
    Action,
    Denoise,
    Load,
    Rebind,
    Strategy,
    loaded_state,
    plan,
    visits,
)
from lorabench.planner import Advice, advise, label
from lorabench.pricing import Memory
from lorabench.rates import SIZES, Machine, Pace, load_machine
from lorabench.recipe import BASE, Phase, Recipe, Role, State, load_recipe, recipe_names
from lorabench.routes import Value, actions_of, value_of
from lorabench.setting import Pricings, Setting
from lorabench.ways import candidates, courses

ROLES = ("a", "b", "c")
TOUCHES = {
    "a": [Target("blocks.0.a", WEIGHT0, 4), Target("blocks.1.a", WEIGHT1, 4)],
    "b": [Target("blocks.0.a", WEIGHT0, 8)],
    "c": [Target("out", OUT, 2), Target("blocks.1.a", WEIGHT1, 4)],
}
SHIPPED_TOUCHES: Touches = {
    "user": TOUCHES["a"], "distilled": TOUCHES["b"], "detailing": TOUCHES["c"]
}  # fmt: skip


def recipe_of(*states: Mapping[str, float], tokens: int = 64) -> Recipe:
    used = [role for role in ROLES if any(role in state for state in states)]
    phases = (Phase(State(state), steps=1, video_tokens=tokens, audio_tokens=1) for state in states)
    return Recipe("invented", "", "", tuple(Role(r, True) for r in used), tuple(phases))


TWO = recipe_of({}, {"a": 1.0})
"""A base phase and one with an adapter, as most shipped recipes are."""

APART = recipe_of({"a": 1.0}, {"b": 1.0})
"""Two phases whose adapters are never fused together, but by a load of everything."""


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    states: st.SearchStrategy[dict[str, float]] = st.dictionaries(
        st.sampled_from(ROLES), st.sampled_from([0.5, 1.0]), max_size=3
    )
    listed = draw(st.lists(states, min_size=1, max_size=3))
    return recipe_of(*listed, tokens=draw(st.sampled_from([1, 64, 4096])))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    rates = st.sampled_from([128.0, 777.0, 2048.0, 1e5])
    maybe = rates | st.none()
    paces = st.builds(Pace, st.sampled_from([1e3, 1e5]), st.sampled_from([512.0, math.inf]))
    cuda = draw(st.booleans())
    read_cold, read_warm = draw(maybe), draw(maybe)
    if read_cold and read_warm:  # else it paid to fill memory, for a page cache too small to use
        read_cold = min(read_cold, read_warm)
    return Machine(
        name="drawn",
        title="",
        device="cuda" if cuda else "cpu",
        memory_bytes=draw(st.sampled_from([1, 60_000, 1 << 20])),
        host_bytes=draw(st.sampled_from([20_000, 1 << 20])) if cuda else None,
        launch_seconds=draw(st.sampled_from([0.0, 0.25])),
        read_cold=read_cold,
        read_warm=read_warm,
        load_warm=draw(rates),
        load_beside=draw(st.none() | rates),
        copy_host=draw(rates),
        copy_device=draw(maybe) if cuda else None,
        copy_new=draw(maybe),
        encode=draw(maybe),
        decode=draw(maybe),
        kernels={
            kernel: dict.fromkeys(SIZES, draw(paces)) for kernel in draw(
                st.sampled_from([("gemm",), ("gemm", "scalar"), ("scalar",)])
            )
        },
        forward=dict.fromkeys(SIZES, draw(paces)),
        origins={},
    )  # fmt: skip


READY = {"apply": ["resident"], "leave": ["first_phase"]}
ALL_LOADED = {"apply": ["resident"], "load": ["all"]}
ONLY: list[dict[str, list[str]]] = [
    {},
    {"apply": ["resident"]},
    READY,
    ALL_LOADED,
    {"apply": ["resident"], "leave": ["last_phase"], "order": ["render_major"]},
    {"apply": ["resident"], "overlap": ["first_forward"], "load": ["base", "all"]},
    {"restore": ["subtract", "images"], "apply": ["resident", "runtime"]},
    {"restore": ["host_snapshot", "device_snapshot", "residual"], "kernel": ["scalar", "gemm"]},
]


@st.composite
def all_settings(draw: st.DrawFn) -> Setting:
    return Setting(
        draw(recipes()),
        renders=draw(st.integers(1, 3)),
        memory_bytes=draw(st.sampled_from([20_000, 33_000, 60_000, 1 << 20])),
        host_bytes=draw(st.sampled_from([None, 5_000])),
        idle_seconds=draw(st.sampled_from([0.0, 3.0, 10.0, 1e4])),
        batch=draw(st.sampled_from([None, 1, 2])),
        only=draw(st.sampled_from(ONLY)),
    )


def every_strategy(setting: Setting, machine: Machine) -> Iterator[Strategy]:
    """Give the allowed points of the strategy space, but for load and leave."""
    free = {name: setting.only.get(name, values) for name, values in STRATEGY_VALUES.items()}
    fields = ("kernel", "restore", "order", "apply", "overlap")
    for values in itertools.product(*(free[field] for field in fields)):
        given = dict(zip(fields, values, strict=True))
        try:
            strategy = Strategy(**given)
        except ConfigError:
            continue
        exact = strategy.restore != "subtract" or "restore" in setting.only
        there = strategy.restore != "device_snapshot" or machine.device == "cuda"
        if exact and there and strategy.kernel in machine.kernels:
            yield strategy


def every_plan(setting: Setting, strategy: Strategy) -> Iterator[tuple[Action, ...]]:
    """Give every plan of a strategy: each load, each state made ready at each end or none."""
    recipe = setting.recipe
    if strategy.apply != "resident":
        yield plan(recipe, strategy, setting.renders, setting.batch)
        return
    path = list(visits(len(recipe.phases), setting.renders, strategy.order, setting.batch))
    ends = sum(phase is None for _, phase in path)
    first, everything = recipe.phases[0].state, loaded_state(recipe, "all")
    states = {BASE, everything, *(phase.state for phase in recipe.phases)}
    leave = setting.only.get("leave", STRATEGY_VALUES["leave"])
    between: list[State | None] = [None] if "last_phase" in leave else [first]
    if len(leave) > 1:
        between += states
    last: list[State | None] = [None] if "last_phase" in leave else [first]
    loads = {
        loaded_state(recipe, load) for load in setting.only.get("load", STRATEGY_VALUES["load"])
    }
    made_ready = list(itertools.product(*[between] * (ends - 1), last))
    for load, ready in itertools.product(loads, made_ready):
        resident, made = load, iter(ready)
        actions: list[Action] = [Load(load)]
        for render, phase in path:
            wanted = next(made) if phase is None else recipe.phases[phase].state
            if wanted is not None and wanted != resident:
                critical = phase is not None
                overlapped = critical and strategy.overlap == "first_forward"
                actions.append(Rebind(resident, wanted, render, phase, critical, overlapped))
                resident = wanted
            if phase is not None:
                actions.append(Denoise(resident, render, phase))
        yield tuple(actions)


def states_in(actions: Sequence[Action]) -> set[State]:
    return {a.after if isinstance(a, Rebind) else a.state for a in actions}


def search(setting: Setting, pricings: Pricings) -> Iterator[tuple[Value, Memory]]:
    """Price every plan that fits."""
    machine, recipe = pricings.machine, setting.recipe
    base_bytes = sum(tensor.nbytes for tensor in pricings.geometry.tensors)
    host_limit = machine.host_bytes or 0
    if machine.host_bytes is not None and setting.host_bytes is not None:
        host_limit = setting.host_bytes
    for strategy in every_strategy(setting, machine):
        warm = pricings.of(recipe, strategy.kernel)
        for actions in every_plan(setting, strategy):
            memory = warm.memory(states_in(actions), strategy.restore, strategy.apply)
            if memory.device_bytes > setting.memory_bytes or memory.host_bytes > host_limit:
                continue
            left = max(machine.memory_bytes, setting.memory_bytes) - memory.device_bytes
            if machine.host_bytes is not None:
                left = max(machine.host_bytes, host_limit) - memory.host_bytes
            cold = machine.read_cold is not None and left < base_bytes
            prices = pricings.of(recipe, strategy.kernel, cold=cold)
            idle = setting.idle_seconds
            try:
                bill = price_plan(actions, recipe, strategy, prices, idle_seconds=idle)
            except UnavailableError:
                continue
            yield value_of(bill), memory


@settings(max_examples=60)
@example(Setting(TWO, 3, 1 << 20, idle_seconds=3.0), CPU)
@example(Setting(TWO, 3, 33_000, idle_seconds=1e4, batch=2), replace(GPU, copy_host=16.0))
@example(Setting(APART, 3, 1 << 20, only=ALL_LOADED), replace(CPU, load_warm=16.0))
@example(Setting(APART, 2, 1 << 20, only=READY, idle_seconds=3.0), CPU)
@given(all_settings(), machines())
def test_no_search_finds_a_cheaper_plan(setting: Setting, machine: Machine):
    pricings = Pricings(machine, GEOMETRY, TOUCHES)
    found = [(value[:2], sum(memory)) for value, memory in search(setting, pricings)]
    if not found:
        with pytest.raises(UnavailableError):
            advise(setting, pricings)
        return
    best = advise(setting, pricings).best
    assert (best.value[:2], sum(best.memory)) == min(found)


@settings(max_examples=60)
@example(Setting(APART, 3, 1 << 20, only=ALL_LOADED), replace(CPU, load_warm=16.0))
@example(Setting(APART, 2, 1 << 20, only=READY, idle_seconds=3.0), CPU)
@given(all_settings(), machines())
def test_what_the_search_reckons_is_what_its_plan_is_priced_at(setting: Setting, machine: Machine):
    ways = courses(setting, Pricings(machine, GEOMETRY, TOUCHES))
    for course, strategy, route in candidates(ways, setting):
        recipe, idle = setting.recipe, setting.idle_seconds
        actions = actions_of(route, recipe, strategy, setting.renders, setting.batch)
        bill = price_plan(actions, recipe, strategy, course.pricing, idle_seconds=idle)
        assert value_of(bill) == route.value
        seconds = pytest.approx(route.value.waited_ns / 1e9, abs=1e-7)
        assert bill.binding_seconds == seconds
        resident = {state for state in states_in(actions) if strategy.apply == "resident"}
        if resident:
            memory = course.pricing.memory(resident, strategy.restore, strategy.apply)
            assert course.memory == memory


@given(all_settings(), machines())
def test_advice_is_sorted_distinct_within_its_limits_and_always_the_same(
    setting: Setting, machine: Machine
):
    try:
        advice = advise(setting, Pricings(machine, GEOMETRY, TOUCHES))
    except UnavailableError:
        return
    assert advice == advise(setting, Pricings(machine, GEOMETRY, TOUCHES))
    values = [choice.value[:2] for choice in advice.choices]
    assert values == sorted(values)
    assert all(map(advice.fits, advice.choices))
    assert not any(map(advice.fits, advice.too_large))
    for choice in (*advice.choices, *advice.too_large):
        for name, may in setting.only.items():
            assert getattr(choice.strategy, name) in may
    told = [(c.actions, c.value, c.strategy.restore) for c in advice.choices]
    assert len(told) == len({*told})


def random_machine(draw: random.Random) -> Machine:
    def pace() -> Pace:
        return Pace(10 ** draw.uniform(3, 7), 10 ** draw.uniform(3, 6))

    def rate() -> float:
        return 10 ** draw.uniform(3, 6)

    cuda = draw.random() < 0.5
    return Machine(
        name="random",
        title="",
        device="cuda" if cuda else "cpu",
        memory_bytes=draw.choice([50_000, 200_000]),
        host_bytes=10**5 if cuda else None,
        launch_seconds=10 ** draw.uniform(-3, 0),
        **{name: rate() for name in (
            "read_cold", "read_warm", "load_warm", "copy_host", "copy_new", "encode", "decode"
        )},
        copy_device=rate() if cuda else None,
        kernels={k: {size: pace() for size in SIZES} for k in ("gemm", "scalar")},
        forward={size: pace() for size in SIZES},
        origins={},
    )  # fmt: skip


@pytest.mark.parametrize("name", recipe_names())
def test_no_preset_that_fits_is_cheaper_than_the_advice(name: str):
    draw = random.Random(f"{name}, 2.5")
    shipped = load_recipe(name)
    settled = beaten = 0
    while settled < 50:
        roles = [r.name for r in shipped.roles if r.required or draw.random() < 0.7]
        setting = Setting(
            shipped.bind({role: draw.choice([0.5, 1.0]) for role in roles}),
            renders=round(10 ** draw.uniform(0, 1.4)),
            memory_bytes=round(10 ** draw.uniform(4.1, 5.0)),
            idle_seconds=draw.choice([0.0, 10 ** draw.uniform(-4, 1)]),
        )
        pricings = Pricings(random_machine(draw), GEOMETRY, SHIPPED_TOUCHES)
        try:
            advice = advise(setting, pricings)
        except UnavailableError:
            assert setting.memory_bytes < 20_000
            continue
        settled += 1
        assert set(advice.named) == set(STRATEGIES)
        best = advice.best
        assert best.memory.device_bytes <= setting.memory_bytes
        for preset, choice in advice.named.items():
            # a preset that isn't exact is not what is asked for
            if not advice.fits(choice) or preset == "subtract":
                continue
            assert best.value[:2] <= choice.value[:2], preset
            assert best.bill.binding_seconds <= choice.bill.binding_seconds + 1e-6
            assert best.bill.critical_seconds <= choice.bill.critical_seconds * (1 + 1e-12) + 1e-6
            beaten += best.value < choice.value
    assert beaten > 100


def ask(recipe: Recipe = TWO, renders: int = 10, machine: Machine = CPU, **given) -> Advice:
    setting = Setting(recipe, renders, given.pop("memory_bytes", 1 << 20), **given)
    return advise(setting, Pricings(machine, GEOMETRY, TOUCHES))


def test_presets_are_priced_as_they_are():
    advice = ask(batch=4, idle_seconds=1.0)
    assert set(advice.named) == {n for n, s in STRATEGIES.items() if s.kernel == "gemm"}
    for name, choice in advice.named.items():
        assert choice.strategy == STRATEGIES[name]
        assert choice.actions == plan(TWO, STRATEGIES[name], 10, 4)


def test_where_nothing_is_rebound_there_is_no_word_of_how():
    advice = ask(recipe_of({"a": 1.0}, {"a": 1.0}))
    assert advice.best.strategy == Strategy()
    assert label(advice.best) == "no rebind"
    assert [label(choice) for choice in advice.choices] == ["no rebind", "runtime", "per layer"]
    only = ask(recipe_of({"a": 1.0}), only={"restore": ["images"], "apply": ["resident"]})
    assert only.best.strategy == Strategy(restore="images")


def test_one_render_is_in_no_order():
    assert {choice.strategy.order for choice in ask(renders=1).choices} == {"render_major"}


def test_idle_time_is_used_but_not_after_the_last_render():
    only = {"restore": ["host_snapshot"], "order": ["render_major"], "apply": ["resident"]}
    best = ask(renders=3, idle_seconds=60.0, only=only | {"overlap": ["none"]}).best
    assert label(best) == "snapshot, ready for next"
    ready = [a for a in best.actions if isinstance(a, Rebind) and not a.critical]
    assert [rebind.render for rebind in ready] == [0, 1]
    none = ask(renders=3, only=only | {"overlap": ["none"]}).best
    assert label(none) == "snapshot"


def test_an_image_that_a_read_hides_is_loaded():
    """Load fuses the last phase's state behind a slow disk; the base is there without an image."""
    slow = replace(CPU, load_warm=16.0)
    best = ask(renders=1, machine=slow, only={"restore": ["images"], "apply": ["resident"]}).best
    assert best.strategy.load == "all"
    assert best.bill.lines[0].cost.seconds == pytest.approx(best.bill.binding_seconds)


def test_a_gpus_snapshot_takes_its_hosts_memory():
    only = {"restore": ["host_snapshot"], "apply": ["resident"]}
    best = ask(machine=GPU, only=only).best
    assert best.memory.host_bytes == 2 * 4096
    with pytest.raises(
        UnavailableError, match=r"of the device's memory and 0.00 GiB of the host's"
    ):
        ask(machine=GPU, only=only, host_bytes=8000)


def test_the_page_cache_holds_the_file_where_memory_is_left():
    base_bytes = sum(tensor.nbytes for tensor in GEOMETRY.tensors)
    warm = ask(only={"apply": ["runtime"]}).best
    assert not warm.cold
    held = warm.memory.device_bytes
    full = replace(CPU, memory_bytes=held + base_bytes - 1)
    cold = ask(machine=full, only={"apply": ["runtime"]}, memory_bytes=held).best
    assert cold.cold
    assert cold.bill.binding_seconds > warm.bill.binding_seconds
    supposed = ask(machine=full, only={"apply": ["runtime"]}, memory_bytes=held + base_bytes).best
    assert not supposed.cold
    for cache in ("warm", "cold"):
        pricings = Pricings(full, GEOMETRY, TOUCHES, cache=cache)
        assert advise(Setting(TWO, 1, 1 << 20), pricings).best.cold == (cache == "cold")


def test_what_nothing_fits_in_is_told_with_what_would():
    with pytest.raises(UnavailableError) as caught:
        ask(memory_bytes=1 << 10)
    assert "fits in 0.00 GiB: the one that needs least, 'runtime', takes 0.00 GiB" in str(
        caught.value
    )


def test_what_a_figure_is_missing_for_is_told():
    advice = ask(machine=replace(CPU, encode=None, copy_new=None))
    assert {choice.strategy.restore for choice in advice.choices}.isdisjoint(["residual", "images"])
    told = " ".join(advice.unpriced)
    assert "residual: machine 'made up' has no figure 'encode'" in told
    assert "images: machine 'made up' has no figure 'copy_new'" in told
    with pytest.raises(UnavailableError, match=r"can be priced: residual: .*'encode'"):
        ask(
            machine=replace(CPU, encode=None),
            only={"restore": ["residual"], "apply": ["resident"]},
        )


def test_what_never_goes_together_is_told():
    with pytest.raises(UnavailableError, match=r"restore: device_snapshot.*takes a CUDA machine"):
        ask(only={"restore": ["device_snapshot"], "apply": ["resident"]})


def test_a_setting_says_all_that_is_wrong_with_it():
    with pytest.raises(ConfigError) as caught:
        Setting(TWO, 0, 1, idle_seconds=math.nan, only={"lode": ["all"], "load": ["al"]})
    for told in ("renders: expected 1 or more, found 0", "idle_seconds", "did you mean 'load'"):
        assert told in str(caught.value)
    assert "only: load: expected some of first_phase, all, base, found 'al'" in str(caught.value)
    with pytest.raises(ConfigError, match="some of first_phase, all, base in a list, found 'all'"):
        Setting(TWO, 1, 1, only={"load": "all"})


def test_adapters_that_a_recipe_does_not_bind_are_not_counted():
    setting = Setting(TWO, 2, 1 << 20)
    bound = advise(setting, Pricings(CPU, GEOMETRY, {"a": TOUCHES["a"]}))
    assert advise(setting, Pricings(CPU, GEOMETRY, TOUCHES)) == bound
    with pytest.raises(ConfigError, match="binds a, and it isn't told"):
        advise(setting, Pricings(CPU, GEOMETRY, {}))
    with pytest.raises(ConfigError, match="factor_bytes are those of a, b, c"):
        advise(setting, Pricings(CPU, GEOMETRY, TOUCHES, factor_bytes=1))


def test_an_adapter_of_another_base_is_refused():
    other = load_geometry("ltx-2.5-22b", shrink=32).cut(1)
    mine = load_geometry("ltx-2.5-22b", shrink=16).cut(1)
    recipe = load_recipe("ti2vid_two_stage").bind()
    pricings = Pricings(load_machine("gb10"), mine, touches_of(other, ["distilled"]))
    with pytest.raises(ConfigError, match=r"'distilled' touches .* of shape .*has shape"):
        advise(Setting(recipe, 1, 1 << 40), pricings)
