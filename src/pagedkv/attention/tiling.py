"""How a GPU launch is cut up: the size of a tile, and over how many programs one history is split. Plain integers.

The choice reads only host numbers (batch size, longest length, the card), so nothing waits for the device and a
captured graph keeps it. It is about time, never about results: kernels take every sequence's own length themselves.
The sizes are bounded by what bench/triton_resources.py shows: no register is spilled on sm_80,
sm_90 and gfx942, by Triton 3.6 and 3.9.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_SPLITS = 128
PROGRAMS_PER_MULTIPROCESSOR = 2  # decode programs that sit on one multiprocessor together
START_COST = 64  # what a program costs before its first tile, in positions read
MERGE_ELEMENTS = 2048  # accumulated by one program of the merge
MERGE_COST = 16  # what each further split adds to the merge of a row, in the same unit


@dataclass(frozen=True)
class Gpu:
    """What a launch depends on. capability: major * 10 + minor for NVIDIA (90: Hopper), 0 for AMD."""

    num_multiprocessors: int
    capability: int

    @property
    def amd(self) -> bool:
        return self.capability == 0

    @property
    def native_fp8(self) -> bool:
        """It converts e4m3 itself; elsewhere the bytes are taken apart by integer arithmetic."""
        return self.capability >= 89


@dataclass(frozen=True)
class Tiling:
    """rows: query rows of a tile; tile: positions of a tile; warps and pipeline stages of a program."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


def next_power_of_two(n: int) -> int:
    """The smallest power of two >= n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def padded(head_dim: int) -> int:
    """Dimensions that a tile holds: a power of two, and 16 at least, which is what a matrix unit takes."""
    return max(16, next_power_of_two(head_dim))


def decode_tiling(gpu: Gpu, group: int, head_dim: int, compute_bytes: int, quantised: bool) -> Tiling:
    """Tile for one query token and ``group`` heads. A lone row is no work for a matrix unit, which takes 16 at least.

    compute_bytes: size of an element that the products are made of (2 or 4); quantised: the pool is int8 or fp8.
    The pipeline of NVIDIA cards fetches the block ids two stages ahead of K and V: five stages keep two tiles coming.
    """
    wide = padded(head_dim) * compute_bytes
    if group == 1:
        tile = (32 if wide <= 256 else 16) // (2 if gpu.amd and quantised else 1)
        return Tiling(rows=1, tile=tile, num_warps=4, num_stages=2)
    rows = max(16, next_power_of_two(group))
    tile = 64 if wide <= 256 and rows <= 64 and not (gpu.amd and quantised) else 32 if wide <= 512 else 16
    tile = max(16, tile // 2) if compute_bytes == 4 and rows > 16 else tile
    warps = 8 if wide > 512 and not gpu.amd else 4
    return Tiling(rows, tile, warps, num_stages=2 if gpu.amd else 5 if wide <= 256 else 3)


def prefill_tiling(
    gpu: Gpu, group: int, head_dim: int, compute_bytes: int, quantised: bool, max_query_len: int
) -> Tiling:
    """Tile for up to ``max_query_len`` query tokens of one sequence with ``group`` heads each.

    Short chunks take small tiles, so that a mixed batch of decodes does not multiply padding. float32 products go
    through the matrix unit in three passes, whose operands leave room for small tiles only.
    """
    wide = padded(head_dim) * compute_bytes
    if compute_bytes == 4:
        most, tile = (32, 32) if wide <= 256 else (16, 32) if wide <= 512 else (16, 16)
    else:
        roomy = gpu.capability >= 90 and not quantised
        most, tile = (128, 64 if roomy else 32) if wide <= 256 else (64, 16 if gpu.amd else 32)
    least = max(16, next_power_of_two(group))
    rows = min(max(next_power_of_two(max(1, max_query_len) * group), least), max(most, least))
    crowded = rows >= 128 or rows * wide > 64 * 256 or (compute_bytes == 4 and rows * wide > 16 * 512)
    warps = 8 if crowded and not gpu.amd else 4
    return Tiling(rows, tile, warps, num_stages=2)


def shared_tiling(gpu: Gpu, group: int, head_dim: int, compute_bytes: int, quantised: bool, num_seqs: int) -> Tiling:
    """Tile for the heads of up to ``num_seqs`` sequences that share a prefix: prefill's, of 64 rows where it fits."""
    tiling = prefill_tiling(gpu, group, head_dim, compute_bytes, quantised, num_seqs)
    rows = max(min(tiling.rows, 64), next_power_of_two(group))
    tile = 16 if quantised and padded(head_dim) * compute_bytes > 256 else tiling.tile
    return Tiling(rows, tile, tiling.num_warps, tiling.num_stages)


def num_splits(num_programs: int, span: int, tile: int, num_multiprocessors: int) -> int:
    """Splits of a history of ``span`` positions when ``num_programs`` programs exist without splitting.

    The least estimated time, in positions read one after the other: rounds of resident programs, times the length of
    a split and its start, plus the merge. Ties go to fewer splits. At least 1, at most MAX_SPLITS and one per tile.
    """
    resident = max(1, num_multiprocessors * PROGRAMS_PER_MULTIPROCESSOR)
    num_tiles = -(-max(span, 1) // tile)

    def time(splits: int) -> int:
        rounds = -(-max(1, num_programs) * splits // resident)
        length = -(-num_tiles // splits) * tile
        return rounds * (length + START_COST) + (0 if splits == 1 else START_COST + MERGE_COST * splits)

    return min(range(1, min(MAX_SPLITS, num_tiles) + 1), key=lambda splits: (time(splits), splits))


def merge_heads(num_tokens: int, num_heads: int, head_dim: int, num_multiprocessors: int) -> int:
    """Query heads that one program of the merge takes: few where tokens are few, so that the whole card merges."""
    heads = 1
    while (
        heads < num_heads
        and heads * 2 * head_dim <= MERGE_ELEMENTS
        and num_tokens * num_heads >= heads * 2 * PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors
    ):
        heads *= 2
    return heads
