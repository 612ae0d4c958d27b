"""A plan, executed on weights, be they resident or streamed."""

from collections.abc import Callable, Iterable, Iterator

from lorabench.cost import Work
from lorabench.plan import Action, Load, Rebind
from lorabench.recipe import BASE
from lorabench.resident import ResidentWeights
from lorabench.streamed import StreamedWeights

Weights = ResidentWeights | StreamedWeights


def perform(
    action: Action, weights: Weights, after_weight: Callable[[str], None] | None = None
) -> Work:
    """Carry out one action; return what it took.

    A denoise action computes nothing here: it asserts that the weights are in the state that its
    forwards ask for. A rebind to be overlapped with it is therefore carried out alone.
    """
    hook = () if after_weight is None else (after_weight,)
    if isinstance(action, Load):
        return weights.load(action.state, *hook)
    if isinstance(action, Rebind):
        assert weights.state == action.before, (weights.state, action)
        return weights.rebind(action.after, *hook)
    wanted = action.state if action.apply == "resident" else BASE
    assert weights.state == wanted, (weights.state, action)
    return Work()


def walk(actions: Iterable[Action], weights: Weights) -> Iterator[tuple[Action, Work]]:
    """Carry out a plan, giving each action with what it took as it ends."""
    for action in actions:
        yield action, perform(action, weights)
