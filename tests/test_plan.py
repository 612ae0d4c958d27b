"""Plans: the actions of each strategy, one by one, and what holds for all of them."""

import dataclasses
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabench.errors import ConfigError
from lorabench.plan import (
    STRATEGIES,
    STRATEGY_NOTES,
    STRATEGY_VALUES,
    Action,
    Denoise,
    Load,
    Rebind,
    Strategy,
    count,
    parse_strategy,
    plan,
)
from lorabench.recipe import BASE, Phase, Recipe, Role, State, load_recipe, recipe_names

FUSED = State(distilled=1.0)
QUARTER, HALF = State(distilled=0.25), State(distilled=0.5)
AS_WRITTEN, PHASE_AWARE = STRATEGIES["as_written"], STRATEGIES["phase_aware"]
DEFAULT = Strategy()

SHIPPED = [load_recipe(name) for name in recipe_names()]
ROLES: list[str] = ["user", "distilled", "detailing"]


def bound(name: str, **strengths: float) -> Recipe:
    return load_recipe(name).bind(strengths or None)


def rebinds(actions: tuple[Action, ...]) -> list[Rebind]:
    return [action for action in actions if isinstance(action, Rebind)]


class TestPlansActionByAction:
    def test_as_written_fuses_at_load_undoes_it_and_fuses_again(self):
        actions = plan(bound("ti2vid_two_stage"), AS_WRITTEN, renders=3)
        assert actions[:5] == (
            Load(FUSED),
            Rebind(FUSED, BASE, render=0, phase=0, critical=True),
            Denoise(BASE, render=0, phase=0),
            Rebind(BASE, FUSED, render=0, phase=1, critical=True),
            Denoise(FUSED, render=0, phase=1),
        )
        # each later render finds the weights fused, and pays the same two again
        assert actions[5:] == tuple(
            action
            for render in (1, 2)
            for action in (
                Rebind(FUSED, BASE, render, 0, True),
                Denoise(BASE, render, 0),
                Rebind(BASE, FUSED, render, 1, True),
                Denoise(FUSED, render, 1),
            )
        )

    def test_phase_aware_saves_the_first_rebind_only(self):
        assert plan(bound("ti2vid_two_stage"), PHASE_AWARE, renders=2) == (
            Load(BASE),
            Denoise(BASE, 0, 0),
            Rebind(BASE, FUSED, 0, 1, True),
            Denoise(FUSED, 0, 1),
            Rebind(FUSED, BASE, 1, 0, True),
            Denoise(BASE, 1, 0),
            Rebind(BASE, FUSED, 1, 1, True),
            Denoise(FUSED, 1, 1),
        )

    @pytest.mark.parametrize(
        "name", ["ti2vid_two_stage", "a2vid_two_stage", "keyframe_interpolation", "hq_two_stage"]
    )
    @pytest.mark.parametrize(("preset", "expected"), [("as_written", 6), ("phase_aware", 5)])
    def test_three_renders_of_two_states(self, name: str, preset: str, expected: int):
        actions = plan(bound(name), STRATEGIES[preset], renders=3)
        assert count(actions, "load") == 1
        assert count(actions, "rebind") == expected
        assert count(actions, "denoise") == 6

    def test_two_strengths_are_two_states(self):
        assert plan(bound("hq_two_stage"), AS_WRITTEN) == (
            Load(HALF),
            Rebind(HALF, QUARTER, 0, 0, True),
            Denoise(QUARTER, 0, 0),
            Rebind(QUARTER, HALF, 0, 1, True),
            Denoise(HALF, 0, 1),
        )

    @pytest.mark.parametrize("preset", STRATEGIES)
    @pytest.mark.parametrize(
        "recipe",
        [
            bound("one_stage", user=1),
            bound("distilled_two_stage", user=0.8),
            bound("distilled_two_stage"),
            bound("dub_it"),
            bound("dfr"),
        ],
    )
    def test_one_state_throughout_is_never_rebound(self, preset: str, recipe: Recipe):
        actions = plan(recipe, STRATEGIES[preset], renders=4)
        fused = STRATEGIES[preset].apply == "resident"
        assert actions[0] == Load(recipe.phases[0].state if fused else BASE)
        assert rebinds(actions) == []

    def test_ic_lora_is_the_mirror_image(self):
        user = State(user=1.0)
        for strategy in (AS_WRITTEN, PHASE_AWARE):
            assert plan(bound("ic_lora"), strategy) == (
                Load(user),
                Denoise(user, 0, 0),
                Rebind(user, BASE, 0, 1, True),
                Denoise(BASE, 0, 1),
            )

    def test_load_base_pays_for_a_first_phase_that_wants_an_adapter(self):
        actions = plan(bound("ic_lora"), Strategy(load="base"))
        assert actions[:2] == (Load(BASE), Rebind(BASE, State(user=1.0), 0, 0, True))

    def test_load_all_takes_each_role_at_its_last_use_in_the_order_of_roles(self):
        recipe = Recipe(
            name="three",
            description="",
            source="",
            roles=tuple(Role(name, False) for name in ("a", "b", "c", "idle")),
            phases=(
                Phase(State(b=0.5, a=0.25), steps=1),
                Phase(State(c=0.75, b=1.0), steps=1),
                Phase(BASE, steps=1),
            ),
        )
        actions = plan(recipe, AS_WRITTEN)
        assert actions[0] == Load(State(a=0.25, b=1.0, c=0.75))

    def test_leaving_the_first_phases_state_ends_every_render_with_a_rebind_none_waits_for(self):
        assert plan(bound("ti2vid_two_stage"), STRATEGIES["ready_for_next"], renders=2) == (
            Load(BASE),
            *(
                action
                for render in (0, 1)
                for action in (
                    Denoise(BASE, render, 0),
                    Rebind(BASE, FUSED, render, 1, True),
                    Denoise(FUSED, render, 1),
                    Rebind(FUSED, BASE, render, None, False),
                )
            ),
        )

    def test_a_batch_goes_through_each_phase_together(self):
        assert plan(bound("ti2vid_two_stage"), STRATEGIES["batched"], renders=2) == (
            Load(BASE),
            Denoise(BASE, 0, 0),
            Denoise(BASE, 1, 0),
            Rebind(BASE, FUSED, 0, 1, True),
            Denoise(FUSED, 0, 1),
            Denoise(FUSED, 1, 1),
        )

    def test_a_batch_ends_once(self):
        both = Strategy(order="phase_major", leave="first_phase")
        actions = plan(bound("ti2vid_two_stage"), both, renders=3)
        assert actions[-1] == Rebind(FUSED, BASE, 2, None, False)
        assert count(actions, "rebind") == 2

    def test_a_batch_may_be_less_than_all_renders(self):
        both = Strategy(order="phase_major", leave="first_phase")
        assert plan(bound("ti2vid_two_stage"), both, renders=3, batch=2)[1:] == (
            Denoise(BASE, 0, 0),
            Denoise(BASE, 1, 0),
            Rebind(BASE, FUSED, 0, 1, True),
            Denoise(FUSED, 0, 1),
            Denoise(FUSED, 1, 1),
            Rebind(FUSED, BASE, 1, None, False),
            Denoise(BASE, 2, 0),
            Rebind(BASE, FUSED, 2, 1, True),
            Denoise(FUSED, 2, 1),
            Rebind(FUSED, BASE, 2, None, False),
        )

    @pytest.mark.parametrize("apply", ["runtime", "per_layer"])
    def test_where_nothing_is_fused_the_base_is_loaded_and_never_rebound(self, apply: str):
        assert plan(bound("hq_two_stage"), STRATEGIES[apply], renders=2) == (
            Load(BASE),
            *(
                Denoise(state, render, phase, apply)
                for render in (0, 1)
                for phase, state in enumerate((QUARTER, HALF))
            ),
        )

    def test_a_rebind_for_a_phase_may_go_ahead_of_its_first_forward(self):
        ready = dataclasses.replace(STRATEGIES["overlapped"], leave="first_phase")
        assert rebinds(plan(bound("ti2vid_two_stage"), ready)) == [
            Rebind(BASE, FUSED, 0, 1, True, overlapped=True),
            Rebind(FUSED, BASE, 0, None, False),
        ]

    @pytest.mark.parametrize("renders", [0, -1])
    def test_no_renders_is_no_plan(self, renders: int):
        with pytest.raises(ConfigError, match=f"found {renders}"):
            plan(bound("one_stage"), DEFAULT, renders)
        with pytest.raises(ConfigError, match=f"batch: .*found {renders}"):
            plan(bound("one_stage"), DEFAULT, batch=renders)

    def test_actions_are_told_in_json(self):
        actions = plan(bound("hq_two_stage"), STRATEGIES["ready_for_next"])
        assert json.loads(json.dumps([action.as_dict() for action in actions])) == [
            {"kind": "load", "state": {"distilled": 0.25}, "critical": True},
            {
                "kind": "denoise",
                "state": {"distilled": 0.25},
                "render": 0,
                "phase": 0,
                "critical": True,
                "apply": "resident",
            },
            {
                "kind": "rebind",
                "from": {"distilled": 0.25},
                "to": {"distilled": 0.5},
                "render": 0,
                "phase": 1,
                "critical": True,
                "overlapped": False,
            },
            {
                "kind": "denoise",
                "state": {"distilled": 0.5},
                "render": 0,
                "phase": 1,
                "critical": True,
                "apply": "resident",
            },
            {
                "kind": "rebind",
                "from": {"distilled": 0.5},
                "to": {"distilled": 0.25},
                "render": 0,
                "phase": None,
                "critical": False,
                "overlapped": False,
            },
        ]


@st.composite
def _strategies(draw: st.DrawFn) -> Strategy:
    """Every strategy that can be meant."""
    fields = {field: draw(st.sampled_from(values)) for field, values in STRATEGY_VALUES.items()}
    in_place = fields["apply"] == "resident" and fields["restore"] != "images"
    return Strategy(**fields if in_place else fields | {"overlap": "none"})


strategies = _strategies()


@st.composite
def invented(draw: st.DrawFn) -> Recipe:
    """Recipes that nobody ships: up to four phases that share, drop, reorder and rescale."""
    states: st.SearchStrategy[dict[str, float]] = st.dictionaries(
        st.sampled_from(ROLES), st.sampled_from([-1.0, 0.0, 0.25, 1.0])
    )
    phases = draw(st.lists(states, min_size=1, max_size=4))
    return Recipe(
        name="invented",
        description="",
        source="",
        roles=tuple(Role(name, False) for name in ROLES),
        phases=tuple(Phase(State(state), steps=1) for state in phases),
    )


@st.composite
def shipped(draw: st.DrawFn) -> Recipe:
    recipe = draw(st.sampled_from(SHIPPED))
    strength = st.sampled_from([0.0, 0.8, 1.0])
    return recipe.bind(
        {r.name: draw(strength) for r in recipe.roles if r.required or draw(st.booleans())}
    )


recipes = shipped() | invented()
renders_of_a_run = st.integers(1, 4)


class TestWhatHoldsForAllPlans:
    @given(recipes, strategies, renders_of_a_run)
    def test_actions_chain_from_one_load_and_no_rebind_is_idle(
        self, recipe: Recipe, strategy: Strategy, renders: int
    ):
        first, *rest = plan(recipe, strategy, renders)
        assert isinstance(first, Load)
        resident = first.state
        for action in rest:
            if isinstance(action, Rebind):
                assert action.before == resident != action.after
                resident = action.after
            else:
                assert isinstance(action, Denoise)
                assert action.state == recipe.phases[action.phase].state
                assert resident == (action.state if action.apply == "resident" else BASE)

    @given(recipes, strategies, renders_of_a_run)
    def test_every_phase_of_every_render_is_denoised_once_and_in_order(
        self, recipe: Recipe, strategy: Strategy, renders: int
    ):
        visits = [
            (action.render, action.phase)
            for action in plan(recipe, strategy, renders)
            if isinstance(action, Denoise)
        ]
        numbers = range(renders), range(len(recipe.phases))
        assert sorted(visits) == list(itertools.product(*numbers))
        by_phase = strategy.order == "phase_major"
        assert visits == sorted(visits, key=lambda visit: visit[::-1] if by_phase else visit)

    @given(recipes, strategies, renders_of_a_run)
    def test_a_rebind_is_for_the_phase_that_follows_or_for_the_next_render(
        self, recipe: Recipe, strategy: Strategy, renders: int
    ):
        actions = plan(recipe, strategy, renders)
        for action, following in itertools.zip_longest(actions, actions[1:]):
            if isinstance(action, Rebind) and action.critical:
                assert isinstance(following, Denoise)
                assert (action.render, action.phase) == (following.render, following.phase)
            elif isinstance(action, Rebind):
                assert strategy.leave == "first_phase"
                assert action.phase is None
                assert action.after == recipe.phases[0].state

    @given(recipes, strategies, renders_of_a_run)
    def test_the_state_left_is_the_one_asked_for(
        self, recipe: Recipe, strategy: Strategy, renders: int
    ):
        last = plan(recipe, strategy, renders)[-1]
        left = last.after if isinstance(last, Rebind) else last.state
        ready = strategy.leave == "first_phase" and strategy.apply == "resident"
        assert left == recipe.phases[0 if ready else -1].state

    @given(recipes, strategies, renders_of_a_run)
    def test_every_state_comes_from_the_recipe(
        self, recipe: Recipe, strategy: Strategy, renders: int
    ):
        load, *rest = plan(recipe, strategy, renders)
        assert isinstance(load, Load)
        asked = {phase.state for phase in recipe.phases}
        assert {a.after if isinstance(a, Rebind) else a.state for a in rest} <= asked
        used = [r.name for r in recipe.roles if any(r.name in p.state for p in recipe.phases)]
        last_use = State({r: s for phase in recipe.phases for r, s in phase.state.items()})
        wanted = {
            "all": State({role: last_use[role] for role in used}),
            "first_phase": recipe.phases[0].state,
            "base": BASE,
        }
        assert load.state == wanted[strategy.load if strategy.apply == "resident" else "base"]

    @given(recipes, strategies, renders_of_a_run)
    def test_kernel_and_restore_dont_make_the_plan(
        self, recipe: Recipe, strategy: Strategy, renders: int
    ):
        default = dataclasses.replace(strategy, kernel=DEFAULT.kernel, restore=DEFAULT.restore)
        assert plan(recipe, strategy, renders) == plan(recipe, default, renders)

    @given(recipes, strategies, renders_of_a_run)
    def test_a_batch_by_phase_never_rebinds_more(
        self, recipe: Recipe, strategy: Strategy, renders: int
    ):
        by_render = dataclasses.replace(strategy, leave="last_phase", order="render_major")
        by_phase = dataclasses.replace(by_render, order="phase_major")
        fewer = count(plan(recipe, by_phase, renders), "rebind")
        assert fewer <= count(plan(recipe, by_render, renders), "rebind")
        assert fewer == count(plan(recipe, by_phase, 1), "rebind")

    @given(recipes, renders_of_a_run)
    def test_knowing_the_recipe_before_the_load_never_rebinds_more(
        self, recipe: Recipe, renders: int
    ):
        written = count(plan(recipe, AS_WRITTEN, renders), "rebind")
        assert 0 <= written - count(plan(recipe, PHASE_AWARE, renders), "rebind") <= 1


class TestStrategy:
    def test_the_default_of_a_field_is_the_first_of_its_values(self):
        assert dataclasses.asdict(DEFAULT) == {
            field: values[0] for field, values in STRATEGY_VALUES.items()
        }

    def test_presets_are_the_points_they_are_named_for(self):
        changed = {
            name: {
                field: value
                for field, value in dataclasses.asdict(strategy).items()
                if value != STRATEGY_VALUES[field][0]
            }
            for name, strategy in STRATEGIES.items()
        }
        snapshot = {"restore": "host_snapshot"}
        assert changed == {
            "as_written": {"kernel": "scalar", "load": "all"},
            "fast_kernel": {"load": "all"},
            "phase_aware": {"kernel": "scalar"},
            "both_fixes": {},
            "snapshot": snapshot,
            "ready_for_next": {**snapshot, "leave": "first_phase"},
            "batched": {**snapshot, "order": "phase_major"},
            "subtract": {"restore": "subtract"},
            "residual": {"restore": "residual"},
            "images": {"restore": "images"},
            "overlapped": {**snapshot, "overlap": "first_forward"},
            "runtime": {"load": "base", "apply": "runtime"},
            "per_layer": {"load": "base", "apply": "per_layer"},
        }

    def test_every_preset_is_described_in_one_line(self):
        assert list(STRATEGY_NOTES) == list(STRATEGIES)
        assert all(note and "\n" not in note for note in STRATEGY_NOTES.values())

    def test_every_wrong_field_is_told_with_what_it_may_be(self):
        with pytest.raises(ConfigError) as caught:
            Strategy(kernel="gem", restore="rereed")
        message = str(caught.value)
        assert "kernel='gem': expected gemm, triton, scalar, reference" in message
        assert "(did you mean 'gemm'?)" in message
        assert "(did you mean 'reread'?)" in message
        assert "device_snapshot" in message

    @pytest.mark.parametrize(
        "text",
        ["images,overlap=first_forward", "overlapped,apply=runtime", "overlapped,restore=images"],
    )
    def test_only_a_rebind_in_place_can_be_overlapped(self, text: str):
        with pytest.raises(
            ConfigError, match=r"overlap=first_forward .* found apply=\w+, restore="
        ):
            parse_strategy(text)

    @pytest.mark.parametrize(
        ("text", "strategy"),
        [
            *STRATEGIES.items(),
            ("both_fixes,restore=host_snapshot", STRATEGIES["snapshot"]),
            (" as_written , load = base ", Strategy("scalar", "base")),
            ("load=base,restore=subtract", Strategy(load="base", restore="subtract")),
        ],
    )
    def test_reads_a_preset_and_overrides(self, text: str, strategy: Strategy):
        assert parse_strategy(text) == strategy

    @given(strategies)
    def test_reads_every_point_from_its_fields(self, strategy: Strategy):
        fields = dataclasses.asdict(strategy).items()
        assert parse_strategy(",".join(f"{field}={value}" for field, value in fields)) == strategy

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("", "unknown preset ''.*as_written"),
            ("both_fixed", "did you mean 'both_fixes'"),
            ("both_fixes,", "expected field=value"),
            ("load=base,both_fixes", "preset can only come first"),
            ("lode=base", "did you mean 'load'.*fields: kernel"),
            ("load=base,load=all", "'load' is given twice"),
            ("both_fixes,load=bass", "did you mean 'base'"),
            ("load=", "load='': expected first_phase"),
        ],
    )
    def test_says_what_it_cannot_read(self, text: str, told: str):
        with pytest.raises(ConfigError, match=told):
            parse_strategy(text)
