"""A run reports its progress."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from mckpt.cli import progress
from tests import door
from tests.tiny import TinyModel


def test_events_come_once_a_second_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    said: list[dict[str, float]] = []
    events = progress.Events("writing", lambda text: said.append(json.loads(text)))
    for tenth in range(51):
        now[0] = 100 + tenth / 10
        events(tenth * 20, 1000, min(3, tenth // 17), 3)
        events(tenth * 20, 1000, min(3, tenth // 17), 3)
    assert [event["bytes"] for event in said] == [200, 400, 600, 800, 1000]
    assert [event["eta_s"] for event in said] == [4.0, 3.0, 2.0, 1.0, 0.0]
    assert {event["bytes_per_s"] for event in said} == {200}
    assert [event["files"] for event in said] == [0, 1, 1, 2, 2]
    assert all(event["rss_bytes"] > 1 << 20 for event in said)


def test_units_of_an_earlier_run_do_not_count_in_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    meter = progress.Meter()
    meter.read(900, 1000)
    now[0] = 1.0
    assert meter.read(910, 1000)["eta_s"] == 9.0


def test_the_progress_line_appears_once_the_total_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    import rich.console

    shown = io.StringIO()
    real = rich.console.Console
    monkeypatch.setattr(
        rich.console, "Console", lambda **how: real(file=shown, force_terminal=True, width=120)
    )
    with progress.Line("writing") as line:
        line.bar.refresh()
        assert "/?" not in shown.getvalue()
        line(500, 1000, 1, 2)
    assert "/?" not in shown.getvalue()
    assert "500/1,000 bytes" in shown.getvalue() or "0.5/1.0 kB" in shown.getvalue()


def test_json_puts_the_result_on_stdout_and_events_on_stderr(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model("llama")
    said = door.good("hf-to-megatron", source, tmp_path / "out", "--json")
    assert json.loads(said.out)["files"]
    event = json.loads(said.err.splitlines()[-1])
    assert event["event"] == "writing"
    assert event["bytes"] == event["total_bytes"] > 0
    assert event["files"] == event["total_files"] > 0
    assert all(json.loads(line) for line in said.err.splitlines())
