"""Checkpoints read ahead by threads: the same tensors in any order, within a memory, with errors and progress."""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from tidemill_engine.loading import read_ahead
from tidemill_engine.loading.checkpoint import INDEX_NAME, Checkpoint
from tidemill_engine.loading.errors import CheckpointError
from tidemill_engine.loading.names import names_of
from tidemill_engine.loading.read_ahead import Read, ReadAhead, plan_reads
from tidemill_engine.models.config import read_config
from tidemill_engine.parallel.tp import TensorParallel


class Numbers:
    """Tensors [rows] full of the number that is their name."""

    def take(self, name: str, shape: Sequence[int], *, axis: int = 0, start: int = 0, end: int = -1) -> torch.Tensor:
        if name == "13":
            raise CheckpointError("tensor 13 is missing")
        return torch.full((shape[axis] if end < 0 else end - start,), float(name))

    def take_integers(self, name: str, shape: Sequence[int], below: int) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=torch.int64)


def reads_of(sizes: Sequence[int]) -> dict[Read, int]:
    return {Read(str(i), (size,), 0, 0, size): 4 * size for i, size in enumerate(sizes)}


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    memory=st.integers(0, 400),
    threads=st.integers(1, 3),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_every_order_is_served_within_the_memory(
    sizes: list[int], memory: int, threads: int, data: st.DataObject
) -> None:
    reads = reads_of(sizes)
    order = data.draw(st.permutations(list(reads)))
    with ReadAhead(Numbers(), reads, memory_bytes=memory, threads=threads) as ahead:
        for read in order:
            made = ahead.take(read.name, read.shape)
            assert torch.equal(made, torch.full(read.shape, float(read.name)))
        assert ahead.most_held_bytes <= max(memory, 4 * max(sizes))


def test_threads_read_at_the_same_time() -> None:
    meeting = threading.Barrier(3)

    class Meeting(Numbers):
        def take(self, name: str, shape: Sequence[int], **place: Any) -> torch.Tensor:
            # Nobody passes before three are here.
            meeting.wait(300)
            return super().take(name, shape, **place)

    reads = reads_of([5] * 6)
    with ReadAhead(Meeting(), reads, threads=3) as ahead:
        for read in reads:
            assert ahead.take(read.name, read.shape).shape == (5,)


def test_an_error_reaches_who_asks_for_the_tensor_and_no_one_else() -> None:
    reads = reads_of([3] * 15)
    with ReadAhead(Numbers(), reads) as ahead:
        for read in reads:
            if read.name == "13":
                with pytest.raises(CheckpointError, match="tensor 13"):
                    ahead.take(read.name, read.shape)
            else:
                assert ahead.take(read.name, read.shape).shape == (3,)


def test_what_nobody_asked_for_does_not_keep_the_threads() -> None:
    before = threading.enumerate()
    with ReadAhead(Numbers(), reads_of([10] * 20), memory_bytes=100):
        pass
    # Others, of whatever ran before, may end meanwhile.
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []


def test_progress_is_told_in_the_log() -> None:
    reads = reads_of([1 << 18] * 4)
    seconds = iter([0.0, 4.0, 5.0, 9.0, 11.0])
    with capture_logs() as lines, ReadAhead(Numbers(), reads, clock=lambda: next(seconds)) as ahead:
        for read in reads:
            ahead.take(read.name, read.shape)
    told = [line for line in lines if line["event"] == "loading_weights"]
    assert len(told) == 2
    assert all(line["loaded_gib"] <= line["of_gib"] for line in told)


def sharded(checkpoint: Path, folder: Path) -> Path:
    """The same tensors in three files."""
    folder.mkdir()
    tensors = load_file(checkpoint / "model.safetensors")
    names = sorted(tensors)
    weight_map = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    return folder


def test_a_model_is_the_same_when_it_is_read_ahead(
    tiny: Callable[..., Path], start_runner: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny("qwen2")
    expected = start_runner(whole, weights="fp32").all_logits(list(range(40)))
    monkeypatch.setattr(read_ahead, "LEAST_BYTES", 0)
    monkeypatch.setattr(read_ahead, "MEMORY_BYTES", 1 << 15)
    folder = sharded(whole, tmp_path / "sharded")
    assert torch.equal(start_runner(folder, weights="fp32").all_logits(list(range(40))), expected)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-1\.safetensors"):
        start_runner(folder)


def test_everything_that_a_model_asks_for_was_planned(tiny: Callable[..., Path]) -> None:
    # Its head is its embedding: asked for twice, read once.
    folder = tiny("qwen3")
    config = read_config(folder)
    checkpoint = Checkpoint(folder, names_of(config.architecture))
    reads = plan_reads(checkpoint, config, TensorParallel())
    stored = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert sum(reads.values()) == stored
