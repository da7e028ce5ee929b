"""Laws of measured speeds of a device."""

from __future__ import annotations

import pytest
import torch

from superscaler_core.cli.main import main
from superscaler_core.simulator import DeviceProfile, measured, meter

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


@pytest.fixture(params=DEVICES)
def measured_meter(request: pytest.FixtureRequest) -> meter.Meter:
    return meter.Meter(torch.device(request.param), secs=0.01)


def test_products_are_faster_the_larger_they_are(measured_meter: meter.Meter) -> None:
    peak, reach = measured_meter.products("float32")
    shares = [share for _, share in reach.points]
    assert peak > 0
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_memory_reaches_its_peak_at_one_size(measured_meter: meter.Meter) -> None:
    peak, reach = measured_meter.streams()
    shares = [share for _, share in reach.points]
    assert peak > 0
    assert max(shares) == 1.0
    assert min(shares) > 0


def test_a_profile_is_measured_with_one_thread() -> None:
    """The clock is that of one thread: with more, what others compute would take no time."""
    seen = []

    class Counting(meter.Meter):
        def timed(self, work: object) -> float:
            seen.append(torch.get_num_threads())
            return 1.0

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = measured.measured_speeds(Counting(torch.device("cpu")), ["float32"], name="x")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}
    assert found.num_cores == measured.num_cores_here()


def test_only_a_host_with_a_device_apart_has_an_issue_rate(measured_meter: meter.Meter) -> None:
    is_apart = measured_meter.device.type == "cuda"
    assert (measured_meter.issue_secs() > 0) == is_apart
    assert (measured_meter.host_bytes_per_sec() is not None) == is_apart
    # A kernel in a graph takes less time than a host needs to launch one.
    assert not is_apart or measured_meter.launch_secs() < measured_meter.issue_secs()


class Apart(meter.Meter):
    """A CPU that stands for a device with a host of its own."""

    is_async = True  # type: ignore[assignment]

    def timed(self, work: object) -> float:
        return 1.0

    def launch_secs(self) -> float:
        return 1e-6

    def issue_secs(self) -> float:
        return 7e-6

    def host_bytes_per_sec(self) -> float:
        return 12e9


def test_profile_has_the_figures_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 5 << 30

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    found = measured.measured_speeds(Apart(torch.device("cpu")), ["float16"], name="mine")
    assert (found.name, found.memory_bytes, found.issue_secs) == ("mine", 5 << 30, 7e-6)
    assert (found.launch_secs, found.host_bytes_per_sec) == (1e-6, 12e9)
    assert found.notes[0].startswith("measured on a GPU, torch")
    assert set(found.flops_per_sec) == {"float16"}


def test_command_writes_a_profile_that_simulate_reads(
    tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "here.json"
    words = ["--device", "cpu", "--secs", "0.001", "--dtypes", "float32,bfloat16"]
    assert main(["profile", str(out), *words]) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    assert set(DeviceProfile.load(out).flops_per_sec) == {"float32", "bfloat16"}
    assert main(["simulate", "gpt", "megatron", "--devices", "2", "--profile", str(out)]) == 0


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "meta", "cpu:3", ""])
def test_device_that_is_not_here_is_refused(
    device: str, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(tmp_path / "x.json"), "--device", device]) == 2
    assert f"--device {device!r}: the devices here are cpu" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--secs", "-1"], ["--secs", "nan"], ["--dtypes", "int8"]])
def test_values_that_cannot_be_measured_are_refused(
    words: list[str], tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(tmp_path / "x.json"), *words]) == 2
    assert "expected" in capsys.readouterr().err


def test_path_that_cannot_be_written_is_refused_before_the_measurement(
    tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path, tmp_path / "none" / "x.json"):
        assert main(["profile", str(path)]) == 2
        assert f"{path}: expected a file in a folder that exists" in capsys.readouterr().err
