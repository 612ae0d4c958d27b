"""The Triton kernel without a GPU: its logic interpreted, its code compiled and looked into.

Run as a script with ``TRITON_INTERPRET=1``, this file tells of every case what the interpreter
made of it: whether a kernel is interpreted is settled when it is imported.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
import torch
import triton
from conftest import bits
from test_kernels import CASES, golden
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lorabench.errors import UnavailableError
from lorabench.fuse import Pair, Term, reference_deltas, reference_fuse
from lorabench.kernels import Scratch, get_kernel, get_tiles, one_nan, triton_block, triton_fuse
from lorabench.kernels.triton_fuse import (
    WIDE,
    Block,
    fuse_triton,
    triton_kernel,
    triton_tiles,
)

CPU = torch.device("cpu")
SMALL = Block(16, 32, 16, warps=1, stages=1)  # many blocks, steps and bands

SHAPES = {  # out, in, ranks
    "one value": (1, 1, [1]),
    "less than a block": (5, 7, [3]),
    "whole blocks and steps": (32, 64, [32]),
    "blocks cut off, a rank left over": (20, 40, [18]),
    "no whole step": (20, 31, [9]),
    "more than a band of blocks": (70, 40, [17]),
    "two adapters": (20, 40, [18, 7]),
    "three adapters": (16, 33, [1, 33, 16]),
}


def term(seed, out, in_, rank, strength, dtype):
    """Factors of few bits, so that every sum is exact in f32 and has one right result."""
    g = torch.Generator().manual_seed(seed)

    def values(*shape):
        return (torch.randint(-8, 9, shape, generator=g) / 16).to(dtype)

    a = torch.full((rank + 40, in_), float("nan"), dtype=dtype)[:rank]  # what follows isn't read
    return Term(Pair(a.copy_(values(rank, in_)), values(out, rank), 1.0), strength)


def rule(base, terms, dtype):
    """Rule R1 with another dtype in the place of bf16, in plain torch."""
    first, *further = [(t.pair.a.to(dtype).float(), t.pair.b.to(dtype).float(), t) for t in terms]
    a, b, t = first
    delta = ((b * t.factor).to(dtype).float() @ a).to(dtype)
    for a, b, t in further:
        delta = (delta.float() + t.factor * (b @ a)).to(dtype)
    return (delta.float() + base.float()).to(dtype).to(base.dtype)


def interpreted():
    """Yield each case's name, and whether the interpreted kernel gave the expected bits."""
    triton_fuse.BAND = 2

    def same(base, terms, expected, **how):
        weight = base.clone()
        fuse_triton(weight, terms, Scratch(), **how)
        one_nan(expected)  # torch on a CPU has two kinds
        return torch.equal(bits(weight), bits(expected))

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        # An f32 times .8 has too many bits for exact sums.
        strengths = (0.5, -1.0, 0.25) if dtype == torch.float32 else (0.8, -1.0, 0.3)
        for held in dict.fromkeys((dtype, torch.float32)):
            for name, (out, in_, ranks) in SHAPES.items():
                terms = [
                    term(i, out, in_, rank, strengths[i], dtype) for i, rank in enumerate(ranks)
                ]
                g = torch.Generator().manual_seed(1)
                base = torch.randn(out, in_, generator=g).to(held)
                expected = rule(base, terms, dtype)
                yield (
                    f"{name}, {dtype} in {held}",
                    same(base, terms, expected, dtype=dtype, block=SMALL),
                )
    for case in CASES:
        base, terms, expected = golden(case)
        yield f"golden {case['name']}", same(base, terms, expected, block=SMALL)
        get_tiles("triton", CPU).fuse(weight := base.clone(), terms, Scratch())
        yield f"golden {case['name']}, by its delta", torch.equal(bits(weight), bits(expected))
    yield from interpreted_odds(same)


def interpreted_odds(same):
    """Yield what is peculiar about single inputs."""
    one = term(0, 33, 65, 18, 0.8, torch.bfloat16)
    base = torch.zeros(33, 65).bfloat16()
    base[0, :6] = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0, 2.0**-133, 3e38])
    yield "infinities, NaN and subnormals", same(base, [one], rule(base, [one], torch.bfloat16))
    a, b = one.pair.a, one.pair.b
    wide = one._replace(pair=one.pair._replace(a=a.float(), b=b.float()))
    yield "factors in f32", same(base, [wide], rule(base, [one], torch.bfloat16))
    turned = one._replace(pair=Pair(a.t().contiguous().t(), b.t().contiguous().t(), 1.0))
    yield "factors that lie the other way", same(base, [turned], rule(base, [one], torch.bfloat16))
    ones = one._replace(strength=1.0)
    aligned = torch.full((33, 32), float("nan")).bfloat16()[:, :18].copy_(b)
    given = ones._replace(pair=ones.pair._replace(b=aligned))
    yield "rows of B with gaps", same(base, [given], rule(base, [ones], torch.bfloat16))
    taken = triton_fuse._ready_b(given, True, Scratch(), torch.bfloat16)
    yield "rows of B that begin well are used as they lie", taken is aligned
    tiles = triton_tiles(CPU)
    weight = base.clone()
    terms = [one, ones]
    [[tile, deltas]] = tiles(weight, terms, Scratch())
    [delta] = deltas
    yield "the delta by itself", torch.equal(delta, reference_deltas(terms)[0])
    yield "what a tile is", tile.data_ptr() == weight.data_ptr() and tile.shape == weight.shape
    triton_fuse.tile_rows = lambda in_: 5
    yield "adapters over tiles of rows", same(base, terms, rule(base, terms, torch.bfloat16))
    kernel = triton_kernel(CPU)
    kernel(weight := base.clone(), [], Scratch())
    yield "no terms leave the base", torch.equal(bits(weight), bits(base))
    one_nan(expected := reference_fuse(base, [one]))
    kernel(weight, [one], Scratch())
    yield "chosen for a device", torch.equal(bits(weight), bits(expected))
    yield from interpreted_kinds(one, ones)


def interpreted_kinds(one, other):
    """Yield weights of other dtypes, and terms that touch some rows only."""
    g = torch.Generator().manual_seed(2)
    some = Term(other.pair.within(range(3, 20))._replace(top=9), 0.3)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        base = torch.randn(33, 65, generator=g).to(dtype)
        base[26:] = -0.0
        upper = Term(one.pair.within(range(12)), 0.8)
        for name, terms in {"all": [one, other], "some": [upper, some]}.items():
            expected = reference_fuse(base, terms)
            for way, fuse in {
                "kernel": get_kernel("triton", CPU),
                "deltas": get_tiles("triton", CPU).fuse,
            }.items():
                fuse(weight := base.clone(), terms, Scratch())
                yield f"{name} rows in {dtype}, {way}", torch.equal(bits(weight), bits(expected))


def test_interpreted_the_kernel_gives_the_rules_bits():
    done = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) > 5 * len(SHAPES) + len(CASES)
    assert [name for name, same in results.items() if not same] == []


class Launches:
    """Stands in the kernel's place, and keeps what it was to be launched with."""

    def __init__(self):
        self.seen = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.seen.append((arguments, options))


POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
SHARED = {80: 163 << 10, 90: 227 << 10, 121: 99 << 10}  # A100, H200, GB10: bytes for programs
ONE_PASS = {"out": 4096, "in_": 4096, "rank": 450, "strengths": [0.8]}
WORK = {
    "one pass": ONE_PASS,
    "one pass with edges": ONE_PASS | {"out": 1000, "in_": 1008},
    "one pass, wide": ONE_PASS | {"block": WIDE},
    "one pass in f32": ONE_PASS | {"held": torch.float32},
    "one pass in f16": ONE_PASS | {"held": torch.float16},
    "32 rows": ONE_PASS | {"out": 32, "rank": 32},
    "two adapters": ONE_PASS | {"strengths": [0.8, 0.3]},
}


def launches(out, in_, rank, strengths, held=torch.bfloat16, block=None):
    """What a fuse would launch on a GPU first, for each of the adapters."""
    a, b = (torch.empty(shape, dtype=torch.bfloat16, device="meta")
            for shape in ((rank, in_), (out, rank)))  # fmt: skip
    weight = torch.empty(out, in_, dtype=held, device="meta")
    kept = Launches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_fuse, "fuse_block", kept)
        terms = [Term(Pair(a, b, 1.0), s) for s in strengths]
        fuse_triton(weight, terms, Scratch("meta"), block=block)
    return kept.seen[: len(strengths)]  # of the first tile of rows


def compiled(capability, arguments, options):
    """Compile a launch for a GPU, with what Triton would know of its arguments."""
    kernel = triton_fuse.fuse_block
    signature, constants, known = {}, {}, {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            known[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value is None:
            constants[name] = None
        else:
            signature[name] = "i32"
            if name not in kernel.do_not_specialize and value % 16 == 0:
                known[(i,)] = [["tt.divisibility", 16]]
    constants |= {name: value for name, value in options.items() if name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, {n: signature[n] for n in kernel.arg_names}, constants, known)
    how = {name: value for name, value in options.items() if name not in kernel.arg_names}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=how)


def resources(cubin, folder):
    """Registers of a thread, and bytes of its stack and local memory: spills are on the stack."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    told = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    [found] = re.findall(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", told)
    return tuple(map(int, found))


CHECKED = [(90, work) for work in WORK] + [
    (capability, work) for capability in (80, 121) for work in ("one pass", "two adapters")
]


@pytest.mark.parametrize(("capability", "work"), CHECKED, ids=str)
def test_compiled_it_multiplies_on_tensor_cores_and_spills_nothing(
    capability, work, monkeypatch, tmp_path
):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    seen = launches(**WORK[work])
    assert len(seen) == len(WORK[work]["strengths"])
    for arguments, options in seen:
        kernel = compiled(capability, arguments, options)
        ptx = kernel.asm["ptx"]
        products = set(re.findall(r"\b(?:wgmma\.mma_async|mma)\.[\w.]+", ptx))
        if capability == 90 and options["ROWS"] >= 64:
            shape = f"m64n{options['COLS']}k16"
            assert products == {f"wgmma.mma_async.sync.aligned.{shape}.f32.bf16.bf16"}
        else:
            assert products == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}
        assert not re.search(r"\bfma\.rn\.f32", ptx), "a product is rounded before it is added"
        assert re.search(r"\bcvt\.rn\.bf16(x2)?\.f32\b", ptx)
        copies = re.findall(r"cp\.async\.c[ag]\.\S+ \[[^]]*\], \[[^]]*\], (\w+)", ptx)
        assert set(copies) == {"0x10"}, "every row begins at 16 bytes"
        step = 2 * options["DEPTH"] * (options["ROWS"] + options["COLS"])
        in_flight = 16 * len(copies) * 32 * options["num_warps"]
        assert in_flight == options["num_stages"] * step, "both factors are copied ahead"
        registers, stack, local = resources(kernel.asm["cubin"], tmp_path)
        assert (stack, local) == (0, 0)
        # Registers of a multiprocessor: the factors' latency is hidden by a second program.
        programs = 2 if capability == 90 and work == "one pass" else 1
        assert programs * registers * 32 * options["num_warps"] <= 1 << 16
        assert programs * kernel.metadata.shared <= SHARED[capability]


@pytest.mark.parametrize("choose", [triton_kernel, triton_tiles])
def test_it_never_runs_where_it_was_not_meant_to(choose):
    with pytest.raises(UnavailableError, match=r"on 'cpu' only in Triton's interpreter.*INTERPRET"):
        choose(CPU)
    with pytest.raises(UnavailableError, match="rule R1 only, R4 was asked for"):
        choose(torch.device("cuda"), "R4")
    choose(torch.device("cuda"))


def test_without_the_package_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.spec_from_file_location("without", triton_block.__file__)
    with pytest.raises(UnavailableError, match="needs the package triton"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(dict(interpreted())))
