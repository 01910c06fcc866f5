"""Packed weights: exact images where they claim to be, and the same products as plain torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tidemill_engine.kernels import build
from tidemill_engine.kernels.build import KernelsUnavailable
from tidemill_engine.kernels.packing import pack_float, pack_q4_1, pack_q8_0
from tidemill_engine.layers.elementwise import NativeElementwise, TorchElementwise
from tidemill_engine.layers.linear import PackedLinear
from tidemill_engine.layers.rotary import RotaryTable
from tidemill_engine.loading.errors import CheckpointError
from tidemill_engine.models.rope_config import RopeConfig


def q4_1_values(outputs: int, inputs: int) -> torch.Tensor:
    codes = torch.randint(0, 16, (outputs, inputs // 32, 32)).float()
    codes[..., 0], codes[..., 1] = 0, 15
    scale = (torch.rand(outputs, inputs // 32, 1) / 50).half().float()
    scale[0, 0] = 0
    return (codes * scale + (-8 * scale + 0.01).half().float()).view(outputs, inputs)


def q8_0_values(outputs: int, inputs: int) -> torch.Tensor:
    codes = torch.randint(-127, 128, (outputs, inputs // 32, 32)).float()
    codes[..., 5] = -127
    return (codes * (torch.rand(outputs, inputs // 32, 1) / 500).half().float()).view(outputs, inputs)


@pytest.fixture(params=["fp32-90", "fp32-96", "bf16-90", "bf16-96", "q4_1-96", "q8_0-96"])
def packed_pair(request: pytest.FixtureRequest) -> tuple[PackedLinear, torch.Tensor, torch.Tensor]:
    """A packed matrix whose last panel is not full, its plain values and its bias."""
    torch.manual_seed(1)
    bias = torch.randn(168)
    name, inputs = request.param.split("-")
    make = {"q4_1": q4_1_values, "q8_0": q8_0_values}.get(name, torch.randn)
    weight = make(168, int(inputs))
    if name == "bf16":
        weight = weight.bfloat16().float()
    pack: dict[str, Callable[[], Any]] = {
        "fp32": lambda: pack_float(weight, bias, "fp32"),
        "bf16": lambda: pack_float(weight, bias, "bf16"),
        "q4_1": lambda: pack_q4_1(weight, bias),
        "q8_0": lambda: pack_q8_0(weight, bias),
    }
    packed = pack[name]()
    assert packed is not None
    assert packed.format == name
    return PackedLinear(packed), weight, bias


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 16, 33, 100])
def test_products_equal_float64_to_float32_rounding(
    packed_pair: tuple[PackedLinear, torch.Tensor, torch.Tensor], rows: int
) -> None:
    linear, weight, bias = packed_pair
    x = torch.randn(rows, weight.shape[1])
    exact = x.double() @ weight.double().T + bias.double()
    bound = 1e-6 * (x.abs().double() @ weight.abs().double().T + bias.abs().double())
    assert ((linear(x).double() - exact).abs() <= bound).all()


def test_one_input_at_a_time_gives_the_weights_back_bit_for_bit(
    packed_pair: tuple[PackedLinear, torch.Tensor, torch.Tensor],
) -> None:
    linear, weight, _ = packed_pair
    plain = PackedLinear(type(linear.packed)(**(vars(linear.packed) | {"bias": None})))
    assert torch.equal(plain(torch.eye(weight.shape[1])), weight.T)


def test_values_that_are_no_image_are_not_taken_for_one() -> None:
    weight = torch.randn(32, 64)
    assert pack_q4_1(weight, None) is None
    assert pack_q8_0(weight, None) is None
    nudged = q4_1_values(32, 64)
    nudged[3, 40] = torch.nextafter(nudged[3, 40], torch.tensor(9.0))
    assert pack_q4_1(nudged, None) is None


def test_norm_rotation_and_gate_equal_torch() -> None:
    torch.manual_seed(2)
    native, plain = NativeElementwise(), TorchElementwise()
    hidden, delta, weight = torch.randn(5, 96), torch.randn(5, 96), torch.randn(96)
    sums = hidden.clone(), hidden.clone()
    normed = [e.add_rms_norm(s, delta, weight, 1e-5) for e, s in zip((native, plain), sums, strict=True)]
    assert torch.equal(*sums)
    torch.testing.assert_close(*normed)
    cos, sin = RotaryTable(RopeConfig(kind="default", theta=1e4), 32, 64).at(torch.tensor([0, 3, 9, 40, 63]))
    heads = torch.randn(5, 6, 32)
    torch.testing.assert_close(native.rotate(heads.clone(), 4, cos, sin), plain.rotate(heads, 4, cos, sin))
    gate_up = torch.randn(5, 192) * 30
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -90.0])
    torch.testing.assert_close(native.silu_mul(gate_up), plain.silu_mul(gate_up))


def test_without_a_compiler_auto_says_so_and_runs_plain_while_a_named_form_is_refused(
    tiny: Callable[..., Path],
    start_runner: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def unavailable() -> None:
        raise KernelsUnavailable("no C compiler")

    monkeypatch.setattr("tidemill_engine.loading.model.load", unavailable)
    driver = start_runner(tiny("llama"))
    assert driver.runner.backend == "cpu/torch-reference/fp32"
    assert "no C compiler" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"weights = 'bf16' cannot be used: no C compiler"):
        start_runner(tiny("llama"), weights="bf16")


def test_a_failing_compiler_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("TIDEMILL_HOME", str(tmp_path))
    with pytest.raises(KernelsUnavailable, match="no such header"):
        build.library()


def test_q4_1_is_refused_for_a_checkpoint_that_is_no_image(
    tiny: Callable[..., Path], start_runner: Callable[..., Any]
) -> None:
    with pytest.raises(CheckpointError, match=r"tensor .* is not an exact image of Q4_1"):
        start_runner(tiny("llama"), weights="q4_1")
