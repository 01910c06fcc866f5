"""Parts of a stored block by head range, as its writer's ranks split the heads. Pure."""

from collections.abc import Iterable

HeadRange = tuple[int, int]
Split = tuple[HeadRange, ...]
"""Head ranges that together are all heads, in order."""

WHOLE = "all"


def shard_name(heads: HeadRange, num_heads: int) -> str:
    """Which part of a block is stored: "all", or its head range."""
    return WHOLE if heads[0] == 0 and heads[1] >= num_heads else f"{heads[0]}-{heads[1]}"


def shard_heads(name: str, num_heads: int) -> HeadRange | None:
    """What shard_name made; None for a name of another making."""
    if name == WHOLE:
        return 0, num_heads
    start, _, end = name.partition("-")
    return (int(start), int(end)) if start.isdecimal() and end.isdecimal() else None


def splits_of(shards: Iterable[str], num_heads: int) -> list[Split]:
    """Equal parts of which a store has shards, those with the fewest parts first."""
    ranges = {heads for name in shards if (heads := shard_heads(name, num_heads)) is not None}
    splits = []
    for width in sorted({end - start for start, end in ranges}, reverse=True):
        if width > 0 and num_heads % width == 0:
            split = tuple((start, start + width) for start in range(0, num_heads, width))
            if ranges.issuperset(split):
                splits.append(split)
    return splits
