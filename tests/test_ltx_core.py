"""Rule R1 against Lightricks' own code, run live (`make` installs it)."""

import pytest
import torch
from conftest import CPU_KERNELS, bits

from lorabench.check import compare
from lorabench.fuse import Pair, Term, reference_fuse
from lorabench.kernels import Scratch, get_kernel

pytest.importorskip("ltx_core", reason="pip install --no-deps ltx-core==1.0.0, and einops")

from lorabench.peers import fuse_ltx_core


def sixteenths(*shape, seed):
    """Values whose products and sums are exact in f32."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-8, 9, shape, generator=generator) / 16).bfloat16()


@pytest.mark.parametrize("strength", [1.0, 0.8, 0.25, -1.0])
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_every_kernel_has_upstreams_bits_for_one_bf16_adapter(kernel, strength):
    base = torch.randn(48, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    # A single 1 in each row of A: no sum has two summands, so no order of summing matters, and
    # strength 0.8 rounds the factor as upstream does.
    a = torch.eye(64)[:24].bfloat16()
    terms = [Term(Pair(a, sixteenths(48, 24, seed=2), 1.0), strength)]
    expected = fuse_ltx_core(base.clone(), terms)
    get_kernel(kernel, torch.device("cpu"))(base, terms, Scratch())
    assert torch.equal(bits(base), bits(expected))


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_every_kernel_has_upstreams_bits_where_sums_are_exact(kernel):
    base = torch.randn(48, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    pair = Pair(sixteenths(24, 64, seed=3), sixteenths(48, 24, seed=4), 1.0)
    expected = fuse_ltx_core(base.clone(), [Term(pair, 0.5)])
    get_kernel(kernel, torch.device("cpu"))(base, [Term(pair, 0.5)], Scratch())
    assert torch.equal(bits(base), bits(expected))


def test_upstream_is_within_the_summation_bound_of_the_reference_on_real_values():
    generator = torch.Generator().manual_seed(0)
    base = (torch.randn(64, 96, generator=generator) * 0.02).bfloat16()
    pair = Pair(
        (torch.randn(45, 96, generator=generator) * 0.03).bfloat16(),
        (torch.randn(64, 45, generator=generator) * 0.03).bfloat16(),
        1.0,
    )
    terms = [Term(pair, 0.8)]
    upstream = fuse_ltx_core(base.clone(), terms)
    assert compare(upstream, base, terms, where="m") < 0.05
    assert not torch.equal(reference_fuse(base, terms), base)
