"""A run reports its progress."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from mckpt.cli import terminal
from mckpt.progress import Progress
from mckpt.verification import levels
from mckpt.verification.verdict import Verdict
from tests.helpers import commands
from tests.helpers.tiny import TinyModel


def test_events_come_once_a_second_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    said: list[dict[str, float]] = []
    events = terminal.Events("writing", lambda text: said.append(json.loads(text)))
    for tenth in range(51):
        now[0] = 100 + tenth / 10
        events(Progress(tenth * 20, 1000, min(3, tenth // 17), 3))
        events(Progress(tenth * 20, 1000, min(3, tenth // 17), 3))
    assert [event["bytes"] for event in said] == [200, 400, 600, 800, 1000]
    assert [event["eta_s"] for event in said] == [4.0, 3.0, 2.0, 1.0, 0.0]
    assert {event["bytes_per_s"] for event in said} == {200}
    assert [event["files"] for event in said] == [0, 1, 1, 2, 2]
    assert all(event["rss_bytes"] > 1 << 20 for event in said)


def test_without_a_terminal_a_line_comes_every_30_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    printed: list[str] = []
    monkeypatch.setattr(terminal, "echo", lambda text, err: printed.append(text))
    with terminal.showing("writing", as_json=False) as show:
        for second in range(101):
            now[0] = 100 + second
            show(Progress(second * 20_000_000, 12_000_000_000, min(3, second // 17), 3))
    assert printed == [
        "writing: 0.60 of 12.00 GB (5 %), 20.00 MB/s, 9 min 30 s left, 1 of 3 files",
        "writing: 1.20 of 12.00 GB (10 %), 20.00 MB/s, 9 min 0 s left, 3 of 3 files",
        "writing: 1.80 of 12.00 GB (15 %), 20.00 MB/s, 8 min 30 s left, 3 of 3 files",
    ]
    del printed[:]
    now[0] = 1000
    with terminal.showing("checking", as_json=False) as show:
        for second in (0, 1, 30, 60, 90):  # nothing moves, then it ends
            now[0] = 1000 + second
            show(Progress(0 if second < 90 else 999, 999))
    assert printed == ["checking: 0 of 999 bytes (0 %)"] * 2


def test_a_long_phase_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "LINE_S", 0.05)
    printed: list[str] = []
    monkeypatch.setattr(terminal, "echo", lambda text, err: printed.append(text))
    with terminal.phases(as_json=False) as show:
        show("comparing")
        terminal.time.sleep(0.3)
    assert printed[0].endswith(" s  comparing") and printed[1].endswith(" s  still: comparing")


def test_units_of_an_earlier_run_do_not_count_in_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    meter = terminal.Meter()
    meter.read(Progress(900, 1000))
    now[0] = 1.0
    assert meter.read(Progress(910, 1000))["eta_s"] == 9.0


def test_the_progress_line_appears_once_the_total_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    import rich.console

    shown = io.StringIO()
    real = rich.console.Console
    monkeypatch.setattr(
        rich.console, "Console", lambda **how: real(file=shown, force_terminal=True, width=120)
    )
    with terminal.StatusLine("writing") as line:
        line.bar.refresh()
        assert "/?" not in shown.getvalue()
        line(Progress(500, 1000, 1, 2))
    assert "/?" not in shown.getvalue()
    assert "500/1,000 bytes" in shown.getvalue() or "0.5/1.0 kB" in shown.getvalue()


@pytest.mark.parametrize(
    ("width", "bar", "more"),
    [(120, True, True), (100, True, True), (90, False, True), (60, False, False)],
)
def test_a_narrow_terminal_keeps_the_numbers(
    monkeypatch: pytest.MonkeyPatch, width: int, bar: bool, more: bool
) -> None:
    import rich.console

    shown = io.StringIO()
    real = rich.console.Console
    monkeypatch.setattr(
        rich.console, "Console", lambda **how: real(file=shown, force_terminal=True, width=width)
    )
    monkeypatch.setattr(terminal, "resident", lambda: 12_345 << 20)
    with terminal.StatusLine("comparing") as line:
        line(Progress(12_300_000_000, 123_400_000_000, 1234, 1234))
        shown.truncate(0)
        line.bar.refresh()
        last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    assert "12.3/123.4 GB" in last and "-:--:--" in last and "\u2026" not in last, last
    assert ("\u2501" in last) is bar and ("1,234 of 1,234 files" in last) is more, last


def test_each_phase_is_a_line_on_stderr_when_it_starts(
    src: Path, torch_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(levels.launching, "require", lambda *names: None)
    monkeypatch.setattr(levels.launching, "launch", lambda module, *more: ran.append(module))
    monkeypatch.setattr(levels.verdict, "decide", lambda *given: Verdict("pass", [], {}))
    said = commands.good("verify", src, torch_dir, "--device", "cpu", "--tp", 4)
    wanted = [
        "writing the weights for tp 4",
        "comparing all stored values, at the same time",
        "transformers computes the logits of 4 sequences on cpu",
        "Megatron-Core computes them with tp 4",
        "judging the logits",
    ]
    lines = said.err.splitlines()
    assert len(lines) == len(wanted) and len(ran) == 2
    for line, words in zip(lines, wanted, strict=True):
        assert re.match(r" *\d+\.\d s  ", line) and words in line
    said = commands.good("verify", src, torch_dir, "--level", "bytes", "--json")
    event = json.loads(said.err)
    assert event.pop("seconds") >= 0
    assert event == {"event": "phase", "message": "comparing all stored values"}


def test_json_puts_the_result_on_stdout_and_events_on_stderr(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model("llama")
    said = commands.good("hf-to-megatron", source, tmp_path / "out", "--json")
    assert json.loads(said.out)["files"]
    event = json.loads(said.err.splitlines()[-1])
    assert event["event"] == "writing"
    assert event["bytes"] == event["total_bytes"] > 0
    assert event["files"] == event["total_files"] > 0
    assert all(json.loads(line) for line in said.err.splitlines())
