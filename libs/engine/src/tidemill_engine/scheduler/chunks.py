"""How long the next chunk of a prompt is."""

from tidemill_engine.settings import EngineSettings


def min_chunk(settings: EngineSettings) -> int:
    """Fewest tokens worth a row's overhead, unless fewer finish the prompt."""
    return max(1, min(settings.block_size, settings.max_num_batched_tokens // 4))


def chunk_tokens(start: int, end: int, budget: int, snapshot_interval: int) -> int:
    """Tokens of the chunk that begins at `start` of a sequence of `end` known tokens.

    With per-sequence state a snapshot can only be taken where a chunk ends. A chunk therefore ends at the last snapshot
    boundary that the budget reaches, and never crosses the deepest boundary that a repeat of the sequence could reuse
    (its last token is always computed again).

        start          boundary        boundary     end
          |---------------|---------------|----------|
          | first chunk: budget reaches here >|
          |     ends here --------------->|
    """
    stop = min(end, start + budget)
    if snapshot_interval == 0 or stop <= start:
        return max(0, stop - start)
    deepest = (end - 1) // snapshot_interval * snapshot_interval
    if stop == end and start < deepest:
        return deepest - start
    boundary = stop // snapshot_interval * snapshot_interval
    if stop < end and boundary > start:
        return boundary - start
    return stop - start
