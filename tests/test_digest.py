"""The digest tells any two sets of bits apart, and is the same number everywhere and always."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabench.digest import BLOCK, BLOCK_BYTES, BitSum, combine, digest

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def counting(nbytes: int) -> torch.Tensor:
    """Bytes that differ from their neighbours."""
    return (torch.arange(nbytes) * 37 % 251).to(torch.uint8)


def test_known_tensors_have_the_digest_they_always_had():
    known = {
        "w": torch.arange(12, dtype=torch.float32).view(3, 4),
        "tail": torch.arange(5, dtype=torch.float32).bfloat16(),
        "long": counting(8 * BLOCK + 11),
    }
    assert digest(known) == "2ff2234ee36f0c167da5b32e5e3b0f9c"
    assert digest({}) == "cae66941d9efbd404e4d88758ea67670"


def plain_sum(data: bytes) -> int:
    """The checksum of a tensor's bytes as its definition reads, a word at a time."""
    mask, p = (1 << 64) - 1, 0x9E3779B97F4A7C15
    total, words = len(data), len(data) // 8
    for start in range(0, words, BLOCK):
        block = 0
        for i in range(start, min(start + BLOCK, words)):
            word = int.from_bytes(data[8 * i : 8 * i + 8], "little")
            z = (i % BLOCK + 1) * p & mask
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
            z = (z ^ (z >> 31)) | 1
            block += (word ^ (word >> 29)) * z
        total = (total * p + block) & mask
    return (total * p + int.from_bytes(data[8 * words :], "little")) & mask


@pytest.mark.parametrize("nbytes", [0, 1, 8, 77, 8 * BLOCK + 29])
def test_vector_arithmetic_gives_what_the_definition_gives_word_by_word(nbytes):
    from lorabench import digest as module

    tensor = torch.randint(256, (nbytes,), dtype=torch.uint8)
    assert module._sum_of(tensor).value == plain_sum(bytes(tensor.tolist()))


@pytest.mark.parametrize("blocks", [1, 3, 40])
@pytest.mark.parametrize("more", [0, 1, BLOCK - 1])
def test_a_gpus_arithmetic_gives_the_cpus_sums(blocks, more):
    from lorabench import digest as module

    words = counting(8 * (blocks * BLOCK + more)).view(torch.int64)
    sums = [s % 2**64 for s in module._sums_on_device(words)]
    assert sums == module._sums_on_cpu(words)
    assert len(sums) == blocks + (more > 0)


@pytest.mark.parametrize("threads", [2, 3])
def test_a_big_tensor_has_the_same_digest_by_any_number_of_threads(threads):
    big = {"w": counting(19 * BLOCK_BYTES + 13)}
    expected, before = digest(big), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert digest(big) == expected
    finally:
        torch.set_num_threads(before)


@given(data=st.binary(min_size=1, max_size=40), bit=st.integers(0, 319))
def test_any_single_flipped_bit_changes_it_tail_bytes_included(data, bit):
    one = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    other = one.clone()
    other[bit // 8 % len(data)] ^= 1 << bit % 8
    assert digest({"w": one}) != digest({"w": other})


@pytest.mark.parametrize("at", [0, 7, 8 * BLOCK - 1, 8 * BLOCK, 16 * BLOCK - 1, 16 * BLOCK, -1])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_changes_it_in_every_block_of_a_long_tensor(at, bit):
    one = counting(16 * BLOCK + 13)
    other = one.clone()
    other[at] ^= 1 << bit
    assert digest({"w": one}) != digest({"w": other})


@given(
    words=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=12, unique=True),
    data=st.data(),
)
def test_swapped_words_change_it(words, data):
    i, j = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
    swapped = words.copy()
    swapped[i], swapped[j] = words[j], words[i]
    assert digest({"w": torch.tensor(words)}) != digest({"w": torch.tensor(swapped)})


@pytest.mark.parametrize("dtype", FLOATS)
def test_swapped_values_of_opposite_sign_change_it(dtype):
    values = torch.arange(1, 65).to(dtype)
    values[32:] = -values[:32]
    for width in (1, 2, 4, 8, 32):
        swapped = values.clone()
        swapped[:width], swapped[32 : 32 + width] = values[32 : 32 + width], values[:width]
        assert digest({"w": values}) != digest({"w": swapped}), width


@pytest.mark.parametrize("dtype", FLOATS)
def test_any_two_changed_signs_change_it(dtype):
    values = torch.zeros(24, dtype=dtype)
    digests = {digest({"w": values})}
    for i in range(24):
        for j in range(i):
            changed = values.clone()
            changed[[i, j]] = -0.0
            digests.add(digest({"w": changed}))
    assert len(digests) == 1 + 24 * 23 // 2


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [2, 8, 1000])
def test_all_signs_changed_at_once_change_it(dtype, count):
    values = torch.linspace(1, 2, count).to(dtype)
    assert digest({"w": values}) != digest({"w": -values})


def test_blocks_that_change_places_change_it():
    one = torch.cat([counting(8 * BLOCK), counting(8 * BLOCK).flip(0)])
    assert digest({"w": one}) != digest({"w": one.roll(8 * BLOCK)})


def test_names_shapes_dtypes_and_sizes_count_where_the_bytes_are_the_same():
    zeros = torch.zeros(16, dtype=torch.uint8)
    variants = [
        {},
        {"w": zeros},
        {"v": zeros},
        {"w": zeros.view(4, 4)},
        {"w": zeros.view(2, 8)},
        {"w": zeros.view(torch.int8)},
        {"w": zeros.view(torch.bfloat16)},
        {"w": zeros.view(torch.float16)},
        {"w": zeros[:8]},
        {"w": zeros[:3]},
        {"w": zeros[:0]},
        {"w": zeros[0]},
        {"w": zeros, "v": zeros},
        {"w": zeros, "v": zeros[:0]},
    ]
    assert len({digest(variant) for variant in variants}) == len(variants)


def test_tensors_that_change_names_change_it():
    a, b = torch.zeros(3), torch.ones(3)
    assert digest({"a": a, "b": b}) != digest({"a": b, "b": a})


def test_payloads_of_nan_and_signs_of_zero_count():
    patterns = [0x7FC0, 0x7FC1, 0x7F81, -0x40, 0x7F80, 0x0000, -0x8000]
    values = [torch.tensor([p], dtype=torch.int16).view(torch.bfloat16) for p in patterns]
    assert sum(bool(v.isnan()) for v in values) == 4
    assert len({digest({"w": v}) for v in values}) == len(patterns)


def test_equal_bits_have_one_digest_wherever_they_lie_in_memory():
    memory = counting(8 * BLOCK + 100)
    expected = digest({"w": memory[:4001].clone()})
    for offset in range(1, 9):
        shifted = torch.cat([torch.zeros(offset, dtype=torch.uint8), memory])
        assert digest({"w": shifted[offset : offset + 4001]}) == expected
    wide = torch.randn(40, 30)
    assert digest({"w": wide.T}) == digest({"w": wide.T.contiguous()})


EDGES = [0, 1, 7, 8, 9, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES]
LONG = counting(2 * BLOCK_BYTES + 13)


@settings(max_examples=30)
@given(
    cuts=st.lists(st.sampled_from(EDGES) | st.integers(0, len(LONG)), max_size=6).map(sorted),
    askew=st.integers(0, 8),
)
def test_bytes_that_come_in_any_division_have_the_sum_of_the_whole(cuts, askew):
    memory = torch.cat([torch.zeros(askew, dtype=torch.uint8), LONG])[askew:]
    bits = BitSum(LONG.shape, LONG.dtype)
    for begin, end in pairwise([0, *cuts, len(LONG)]):
        bits.update(memory[begin:end])
    assert combine({"w": bits}) == LONG_DIGEST


LONG_DIGEST = digest({"w": LONG})


@given(data=st.binary(max_size=30), cuts=st.lists(st.integers(0, 30), max_size=4).map(sorted))
def test_short_tensors_too_down_to_none_and_with_nothing_given_after_the_end(data, cuts):
    whole = torch.tensor(list(data), dtype=torch.uint8)
    bits = BitSum(whole.shape, whole.dtype)
    for begin, end in pairwise([0, *cuts, len(data), len(data)]):
        bits.update(whole[begin:end])
    assert bits.value == plain_sum(data)


def test_what_was_given_may_be_overwritten_at_once():
    buffer = torch.empty(100, dtype=torch.uint8)
    bits = BitSum((50, 5), torch.bfloat16)
    data = counting(500)
    for begin in range(0, 500, 100):
        buffer.copy_(data[begin : begin + 100])
        bits.update(buffer)
    buffer.zero_()
    assert combine({"w": bits}) == digest({"w": data.view(torch.bfloat16).view(50, 5)})


def test_a_tensor_that_begins_between_the_words_of_its_memory_has_the_digest_of_its_copy():
    for skipped in range(1, 17):
        for begin in range(17):  # the memory may begin on a word where the tensor doesn't
            memory = torch.frombuffer(bytearray(100), dtype=torch.uint8, offset=skipped)
            memory.copy_(counting(100 - skipped))
            tensor = memory[begin:]
            assert digest({"w": tensor}) == digest({"w": tensor.clone()})


def test_the_order_of_the_mapping_does_not_count():
    tensors = {name: torch.randn(5) for name in "abc"}
    assert digest(tensors) == digest({name: tensors[name] for name in "cab"})
