"""One block of a fuse, as Triton compiles it."""
# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false, reportOptionalOperand=false
# Values are of Triton's types here, whatever Python's operators say.

from lorabench.errors import UnavailableError

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    raise UnavailableError(
        "kernel 'triton' needs the package triton, which is not installed; a CUDA build of torch "
        "brings it"
    ) from error

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels are interpreted: as ``TRITON_INTERPRET`` was when this module was imported."""


@triton.jit
def _rounded(x, DTYPE: tl.constexpr, BITWISE: tl.constexpr):
    """Round f32 to a dtype, to nearest, ties to even."""
    if BITWISE:
        # Triton's interpreter takes halves away from zero when it rounds to bf16.
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = tl.where(x == x, bits, 0x7FC0)
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit(do_not_specialize=("out", "rank"))
def fuse_block(
    weight,  # [out, in_], gapless; base bits, or None
    delta,  # [out, in_], gapless; the delta of the terms before, or None
    b,  # [out, rank]
    a,  # [rank, in_]
    factor,
    out,
    in_,
    rank,
    b_stride,
    a_stride,
    FIRST: tl.constexpr,  # of the terms: B is scaled already, and no delta goes before
    LAST: tl.constexpr,  # of the terms: the delta goes to the weight, else to `delta`
    EDGE: tl.constexpr,  # whether some blocks are cut off by the weight's edge
    DTYPE: tl.constexpr,  # that is rounded to
    BITWISE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    TAIL: tl.constexpr,  # room for the ranks that are left after whole steps, or 0
    BAND: tl.constexpr,
):
    """Add one term of a state to one block ``[ROWS, COLS]`` of a weight, or of its delta."""
    blocks_down = tl.cdiv(out, ROWS)
    blocks_across = tl.cdiv(in_, COLS)
    program = tl.program_id(0)
    band = program // (BAND * blocks_across)
    within = program % (BAND * blocks_across)
    height = tl.minimum(blocks_down - band * BAND, BAND)
    top = (band * BAND + within % height) * ROWS
    left = (within // height) * COLS
    # A weight may have more than 2^31 elements, but no block of it has: what differs between the
    # values of a block stays in 32 bits, and in few registers.
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    corner = top.to(tl.int64) * in_ + left
    here = row * in_ + col
    in_rows = row < out - top if EDGE else None
    in_cols = col < in_ - left if EDGE else None
    inside = in_rows & in_cols if EDGE else None

    b += top.to(tl.int64) * b_stride
    a += left
    steps = rank // DEPTH
    if TAIL:  # asked for now, used last
        rest = rank - steps * DEPTH
        b_rank = tl.arange(0, TAIL)[None, :]
        a_rank = tl.arange(0, TAIL)[:, None]
        b_mask = in_rows & (b_rank < rest) if EDGE else b_rank < rest
        a_mask = in_cols & (a_rank < rest) if EDGE else a_rank < rest
        b_tail = tl.load(b + steps * DEPTH + (row * b_stride + b_rank), mask=b_mask, other=0.0)
        a_end = a + (steps * DEPTH).to(tl.int64) * a_stride
        a_tail = tl.load(a_end + (a_rank * a_stride + col), mask=a_mask, other=0.0)

    b_step_at = row * b_stride + tl.arange(0, DEPTH)[None, :]
    a_step_at = tl.arange(0, DEPTH)[:, None] * a_stride + col
    total = tl.zeros((ROWS, COLS), tl.float32)
    for _ in range(steps):
        b_step = tl.load(b + b_step_at, mask=in_rows)
        a_step = tl.load(a + a_step_at, mask=in_cols)
        if BITWISE:  # the interpreter would multiply bf16's bits
            total = tl.dot(b_step.to(tl.float32), a_step.to(tl.float32), total)
        else:
            total = tl.dot(b_step, a_step, total)
        b += DEPTH
        a += DEPTH * a_stride
    if TAIL:
        if BITWISE:
            total = tl.dot(b_tail.to(tl.float32), a_tail.to(tl.float32), total)
        else:
            total = tl.dot(b_tail, a_tail, total)

    if not FIRST:
        before = tl.load(delta + corner + here, mask=inside)
        total = before.to(tl.float32) + factor * total
    rounded = _rounded(total, DTYPE, BITWISE)
    if LAST:
        # Used once: the factors are to stay in L2.
        base = tl.load(weight + corner + here, mask=inside, eviction_policy="evict_first")
        fused = rounded.to(tl.float32) + base.to(tl.float32)
        if weight.dtype.element_ty != tl.float16:  # an f16 weight has more bits than bf16
            fused = _rounded(fused, DTYPE, BITWISE)
        fused = fused.to(weight.dtype.element_ty)
        tl.store(weight + corner + here, fused, mask=inside, cache_modifier=".cs")
    else:
        tl.store(delta + corner + here, rounded, mask=inside)
