"""Others' code for the same work, to be measured beside ours."""

from collections.abc import Sequence

from torch import Tensor

from lorabench.errors import UnavailableError
from lorabench.fuse import Term


def fuse_ltx_core(weight: Tensor, terms: Sequence[Term]) -> Tensor:
    """Return ``weight [out, in]`` fused by ``apply_loras`` of Lightricks/LTX-2's ltx-core.

    It has no scale, so strength x scale goes in as the strength.

    Raises
    ------
    UnavailableError
        ltx-core isn't installed.
    """
    try:
        from ltx_core.loader.fuse_loras import apply_loras
        from ltx_core.loader.primitives import LoraStateDictWithStrength, StateDict
    except ImportError as error:
        raise UnavailableError(
            f"peer 'ltx_core' isn't installed ({error}); run "
            f"'pip install --no-deps ltx-core==1.0.0' and 'pip install einops'"
        ) from error

    def state_dict(tensors: dict[str, Tensor]) -> StateDict:
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        return StateDict(tensors, weight.device, nbytes, {weight.dtype})

    loras = [
        LoraStateDictWithStrength(
            state_dict({"m.lora_A.weight": pair.a, "m.lora_B.weight": pair.b}),
            strength * pair.scale,
        )
        for pair, strength in terms
    ]
    return apply_loras(state_dict({"m.weight": weight}), loras).sd["m.weight"]
