"""Tests of ``bench.cluster.stream``, over loopback."""

from __future__ import annotations

import pytest

from bench.cluster import stream


def test_loopback_stream_is_faster_than_1_gbit_per_second() -> None:
    # 125 MB/s is 1 Gbit/s; loopback reaches 10 to 30 Gbit/s, so a busy machine passes too.
    assert stream.loopback_stream(0.2) > 125e6


def test_measure_names_the_receiver_when_it_fails() -> None:
    # TEST-NET-1: an address that no machine has.
    with pytest.raises(stream.StreamError, match=r"the receiver ended with status 1: .*assign"):
        stream.measure("192.0.2.1", 0.1)


def test_measure_names_the_sender_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(stream.StreamError, match="the sender ended with status 7"):
        stream.measure("127.0.0.1", 0.1, sender_prefix=["sh", "-c", "exit 7"])


def test_command_line_prints_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert stream.main(["--seconds", "0.1"]) == 0
    assert capsys.readouterr().out.startswith("loopback: ")


def test_send_command_without_a_port_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        stream.main(["send"])
    assert "the number that the receiver printed" in capsys.readouterr().err
