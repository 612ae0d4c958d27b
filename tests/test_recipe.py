"""Recipes: the shipped table, states, binding, and what a wrong file is told."""

import copy
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabench.errors import ConfigError
from lorabench.recipe import (
    BASE,
    Phase,
    Recipe,
    Role,
    State,
    load_recipe,
    recipe_names,
)

# Lightricks/LTX-2 1.2.0: role to "is it required"; a phase is adapters, steps, evaluations,
# guidance passes, video tokens, audio tokens.
USER, BOTH = {"user": 1.0}, {"user": 1.0, "distilled": 1.0}
FULL_THEN_DISTILLED = (
    {"user": False, "distilled": True},
    [(USER, 30, 1, 4, 6144, 126), (BOTH, 3, 1, 1, 24576, 126)],
)
TABLE = {
    "one_stage": ({"user": False}, [(USER, 30, 1, 4, 6144, 126)]),
    "t2a_one_stage": ({"user": False}, [(USER, 30, 1, 3, None, 126)]),
    "ti2vid_two_stage": FULL_THEN_DISTILLED,
    "a2vid_two_stage": FULL_THEN_DISTILLED,
    "keyframe_interpolation": FULL_THEN_DISTILLED,
    "hq_two_stage": (
        {"user": False, "distilled": True},
        [
            ({"user": 1.0, "distilled": 0.25}, 15, 2, 3, 8160, 126),
            ({"user": 1.0, "distilled": 0.5}, 3, 2, 1, 32640, 126),
        ],
    ),
    "distilled_two_stage": (
        {"user": False},
        [(USER, 8, 1, 1, 6144, 126), (USER, 3, 1, 1, 24576, 126)],
    ),
    "ic_lora": ({"user": True}, [(USER, 8, 1, 1, 6144, 126), ({}, 3, 1, 1, 24576, 126)]),
    "dub_it": ({"user": True}, [(USER, 8, 1, 1, 6144, 126), (USER, 3, 1, 1, 24576, 126)]),
    "hdr_ic_lora": ({"user": True}, [(USER, 8, 1, 1, 6144, None), (USER, 2, 1, 1, 24576, None)]),
    "dfr": (
        {"user": False, "distilled": True, "detailing": False},
        [
            (BOTH, 8, 1, 1, 6144, 126),
            ({**BOTH, "detailing": 1.0}, 3, 1, 1, 24576, 126),
        ],
    ),
    "retake": ({"user": False}, [(USER, 40, 1, 4, 6144, 126)]),
}


def write(folder: Path, text: str, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    return str(caught.value)


def test_every_recipe_of_the_table_ships_and_no_other():
    assert recipe_names() == sorted(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_a_shipped_recipe_has_the_values_of_its_source(name: str):
    roles, phases = TABLE[name]
    recipe = load_recipe(name)
    assert recipe.name == name
    assert "Lightricks/LTX-2 1.2.0" in recipe.source
    assert recipe.description
    assert recipe.roles == tuple(Role(*role) for role in roles.items())
    assert [
        (p.steps, p.evaluations, p.guidance_passes, p.video_tokens, p.audio_tokens)
        for p in recipe.phases
    ] == [tuple(values) for _, *values in phases]
    assert [list(p.state.items()) for p in recipe.phases] == [
        list(adapters.items()) for adapters, *_ in phases
    ]


def test_what_a_count_cannot_say_is_said_in_a_note():
    assert "tiles" in load_recipe("hdr_ic_lora").phases[1].note
    assert "temporal rounds" in load_recipe("dfr").phases[1].note
    assert "8 steps of 1" in load_recipe("retake").phases[0].note


def test_a_recipe_answers_to_its_name_elsewhere():
    assert load_recipe("res2s_two_stage") == load_recipe("hq_two_stage")


def test_no_alias_hides_a_recipe_or_another_alias():
    words = [*recipe_names(), *(a for name in recipe_names() for a in load_recipe(name).aliases)]
    assert len(words) == len(set(words))


def test_importing_recipes_and_plans_needs_only_the_standard_library():
    code = (
        "import sys, lorabench.plan\n"
        "heavy = {'torch', 'numpy', 'pandas', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class TestState:
    def test_reads_as_a_mapping_in_the_order_of_fusing(self):
        state = State({"user": 1.0, "distilled": 0.5})
        assert list(state.items()) == [("user", 1.0), ("distilled", 0.5)]
        assert state["distilled"] == 0.5
        assert "detailing" not in state
        assert state == State(user=1.0, distilled=0.5)

    def test_order_tells_states_apart(self):
        one, other = State(user=1, distilled=1), State(distilled=1, user=1)
        assert one != other
        assert len({one, other, State(user=1, distilled=1)}) == 2

    def test_strength_tells_states_apart(self):
        assert State(distilled=0.25) != State(distilled=0.5)

    @pytest.mark.parametrize("zero", [0, 0.0, -0.0])
    def test_strength_zero_drops_out(self, zero: float):
        assert State(user=zero) == BASE == State()
        assert State(user=zero, distilled=1) == State(distilled=1)

    @pytest.mark.parametrize("strength", [math.nan, math.inf, -math.inf, True, "1", None])
    def test_only_finite_numbers_are_strengths(self, strength: object):
        with pytest.raises(ConfigError, match=r"'user'.*finite"):
            State({"user": strength})  # pyright: ignore[reportArgumentType]

    @pytest.mark.parametrize(
        ("state", "text"),
        [
            (BASE, "base"),
            (State(distilled=0.25), "distilled@0.25"),
            (State(user=1, distilled=-0.5), "user@1 + distilled@-0.5"),
            (State(user=0.1234567891), "user@0.1234567891"),
        ],
    )
    def test_reads_as_text_and_back(self, state: State, text: str):
        assert str(state) == text
        assert State.parse(text) == state

    @pytest.mark.parametrize("text", ["", "user", "user@", "user@1 +", "user@x", "user@nan"])
    def test_refuses_what_is_no_states_text(self, text: str):
        with pytest.raises(ConfigError, match=r"user|expected base"):
            State.parse(text)

    def test_cannot_be_changed(self):
        state = State(user=1)
        with pytest.raises(AttributeError):
            state._pairs = ()  # pyright: ignore[reportAttributeAccessIssue]
        state.as_dict()["user"] = 2.0
        assert state == State(user=1)

    @given(st.dictionaries(st.text(min_size=1), st.floats(allow_nan=False, allow_infinity=False)))
    def test_survives_a_copy_a_pickle_and_its_own_dict(self, strengths: dict[str, float]):
        state = State(strengths)
        for twin in (
            copy.deepcopy(state),
            pickle.loads(pickle.dumps(state)),
            State(state.as_dict()),
            eval(repr(state)),
        ):
            assert twin == state
            assert hash(twin) == hash(state)


class TestBind:
    def test_binds_the_required_roles_unless_told_otherwise(self):
        bound = load_recipe("ti2vid_two_stage").bind()
        assert bound.roles == (Role("distilled", True),)
        assert [p.state for p in bound.phases] == [BASE, State(distilled=1)]

    def test_multiplies_the_recipes_strength_by_the_users(self):
        bound = load_recipe("hq_two_stage").bind({"distilled": 0.5, "user": 0.8})
        assert [p.state for p in bound.phases] == [
            State(user=0.8, distilled=0.125),
            State(user=0.8, distilled=0.25),
        ]

    def test_keeps_everything_but_roles_and_states(self):
        recipe = load_recipe("retake")
        (phase,) = recipe.bind().phases
        assert phase == Phase(BASE, 40, 1, 4, 6144, 126, recipe.phases[0].note)

    def test_binding_every_role_at_one_changes_nothing(self):
        for recipe in map(load_recipe, recipe_names()):
            assert recipe.bind({role.name: 1 for role in recipe.roles}) == recipe

    def test_a_role_bound_at_zero_is_in_no_state(self):
        assert [p.state for p in load_recipe("dub_it").bind({"user": 0}).phases] == [BASE, BASE]

    def test_names_every_unknown_and_missing_role_at_once(self):
        with pytest.raises(ConfigError) as caught:
            load_recipe("dfr").bind({"detaling": 1.0, "usr": 1.0})
        message = str(caught.value)
        assert "'dfr'" in message
        assert "'detaling' (did you mean 'detailing'?)" in message
        assert "'usr' (did you mean 'user'?)" in message
        assert "required role 'distilled'" in message
        assert "user (optional), distilled (required), detailing (optional)" in message

    def test_an_empty_mapping_binds_nothing_and_so_misses_what_is_required(self):
        assert load_recipe("one_stage").bind({}).roles == ()
        with pytest.raises(ConfigError, match="required role 'user'"):
            load_recipe("ic_lora").bind({})

    @pytest.mark.parametrize("strength", [math.nan, math.inf, "1"])
    def test_refuses_a_strength_that_is_no_finite_number(self, strength: object):
        with pytest.raises(ConfigError, match=r"'user'.*finite"):
            load_recipe("one_stage").bind({"user": strength})  # pyright: ignore[reportArgumentType]


class TestFile:
    def test_a_short_file_is_a_whole_recipe(self, tmp_path: Path):
        path = write(
            tmp_path,
            """
            description = "two adapters, one after the other"
            roles = { sketch = "required", style-2 = "optional" }
            phases = [
              { steps = 4, adapters = { sketch = 1 } },
              { steps = 2, adapters = { style-2 = -0.5 }, note = "loosely" },
            ]
            """,
        )
        recipe = Recipe(
            name="mine",
            description="two adapters, one after the other",
            source="",
            roles=(Role("sketch", True), Role("style-2", False)),
            phases=(
                Phase(State(sketch=1), steps=4),
                Phase(State({"style-2": -0.5}), steps=2, note="loosely"),
            ),
        )
        assert load_recipe(path) == load_recipe(str(path)) == recipe

    def test_everything_wrong_is_told_at_once(self, tmp_path: Path):
        path = write(
            tmp_path,
            """
            descripton = "misspelled"
            aliases = [7]
            [roles]
            user = "optinal"
            spare = "optional"
            [[phases]]
            adapters = { user = nan, usr = 1.0 }
            steps = 0
            gidance_passes = 4
            [[phases]]
            adapters = { user = inf }
            steps = 2.0
            evaluations = true
            [[phases]]
            video_tokens = -1
            """,
        )
        head, *problems = refusal(path).splitlines()
        assert head == f"{path}: not a recipe yet, problems found: {len(problems)}"
        told = {line.split(":")[0].strip(): line for line in problems}
        assert set(told) == {
            "descripton",
            "description",
            "aliases.0",
            "roles.user",
            "roles.spare",
            "phases.0.adapters.user",
            "phases.0.adapters.usr",
            "phases.0.steps",
            "phases.0.gidance_passes",
            "phases.1.adapters.user",
            "phases.1.steps",
            "phases.1.evaluations",
            "phases.2.steps",
            "phases.2.video_tokens",
        }
        assert len(told) == len(problems)
        assert "did you mean 'description'?" in told["descripton"]
        assert "did you mean 'guidance_passes'?" in told["phases.0.gidance_passes"]
        assert "did you mean 'user'?" in told["phases.0.adapters.usr"]
        assert "no phase uses it" in told["roles.spare"]
        assert "required, but missing" in told["phases.2.steps"]
        assert "found 'optinal'" in told["roles.user"]
        assert "found 0" in told["phases.0.steps"]
        assert "found nan" in told["phases.0.adapters.user"]

    @pytest.mark.parametrize(
        ("text", "where"),
        [
            ("description = 'none'", "phases: required"),
            ("description = 'none'\nphases = []", "phases: .*at least 1"),
            ("description = 'table'\nphases = { steps = 1 }", "phases: .*list"),
            (
                "description = 'odd'\nroles = 3\nphases = [1]",
                r"roles: .*found 3\n.*phases\.0: .*found 1",
            ),
            (
                "description = 'zero'\nroles = { a = 'optional' }\n"
                "phases = [{ steps = 1, adapters = { a = 0.0 } }]",
                "roles.a: no phase uses it",
            ),
            (
                "description = 'name'\nroles = { 'a=b' = 'optional' }\n"
                "phases = [{ steps = 1, adapters = { 'a=b' = 1.0 } }]",
                "roles.a=b.*pattern",
            ),
            (
                f"description = 'huge'\nroles = {{ a = 'optional' }}\n"
                f"phases = [{{ steps = 1, adapters = {{ a = 1{'0' * 400} }} }}]",
                "phases.0.adapters.a",
            ),
        ],
    )
    def test_a_wrong_shape_is_told_by_its_path(self, tmp_path: Path, text: str, where: str):
        path = write(tmp_path, text)
        with pytest.raises(ConfigError, match=where) as caught:
            load_recipe(path)
        assert str(path) in str(caught.value)

    def test_a_role_given_twice_is_refused(self, tmp_path: Path):
        path = write(tmp_path, "[roles]\nuser = 'optional'\nuser = 'required'\n")
        assert f"{path}: is not TOML in UTF-8" in refusal(path)
        assert "line 3" in refusal(path)

    def test_a_file_that_cannot_be_read_is_named(self, tmp_path: Path):
        gone = tmp_path / "gone.toml"
        assert str(gone) in refusal(gone)
        assert "No such file" in refusal(gone)
        assert "found a folder" in refusal(tmp_path)
        latin = tmp_path / "latin.toml"
        latin.write_bytes("description = 'café'".encode("latin-1"))
        assert f"{latin}: is not TOML in UTF-8" in refusal(latin)
        assert "position 18" in refusal(latin)
        broken = write(tmp_path, "steps = = 3", "broken.toml")
        assert f"{broken}: is not TOML" in refusal(broken)
        assert "line 1, column 9" in refusal(broken)

    def test_an_unknown_name_is_met_with_the_closest_and_the_list(self):
        message = refusal("ti2vid_twostage")
        assert "did you mean 'ti2vid_two_stage'?" in message
        assert all(name in message for name in recipe_names())
        assert "did you mean 'res2s_two_stage'?" in refusal("res2_two_stage")
        assert ".toml" in refusal("")
