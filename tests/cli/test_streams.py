"""Signals, and standard streams that are closed or full: no traceback, and the exit code tells
whether the output is there.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mckpt import cli, errors
from tests.helpers.commands import ROOT, command_line, good, run, tree

PUBLISHED = errors.Unreported.exit_code
# stops where the data is complete, and before it is published
STOP = """import os, signal, time
from mckpt.conversion import run
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
run.publish = lambda *a, **k: (print('here', flush=True), time.sleep(60))
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_interrupts_and_the_same_command_goes_on(
    tmp_path: Path, src: Path, number: signal.Signals, code: int
) -> None:
    dst = tmp_path / "dst"
    process = subprocess.Popen(
        command_line("hf-to-megatron", src, dst, before=STOP),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    last = said.splitlines()[-1]
    assert process.returncode == code and "Traceback" not in said, said
    assert "" not in said.splitlines()  # with --json, every line is an object
    assert (
        last == f"mckpt: interrupted by {number.name}; the same command continues where it stopped"
    )
    assert list(dst.glob(".mckpt-*/data/*"))
    good("hf-to-megatron", src, dst)
    assert not list(dst.glob(".mckpt-*"))


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path, src: Path) -> None:
    """nohup ignores SIGHUP."""
    kill = "import os, signal; from mckpt.conversion import run; real = run.publish\n"
    kill += "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    kill += "run.publish = lambda *a: (os.kill(os.getpid(), signal.SIGHUP), real(*a))"
    run(command_line("hf-to-megatron", src, tmp_path / "dst", before=kill))


@pytest.mark.parametrize(
    ("redirection", "code"),
    [
        (">/dev/full", PUBLISHED),
        ("2>/dev/full", 0),
        (">/dev/full 2>&1", PUBLISHED),
        (">&-", 0),
        ("<&- >&- 2>&-", 0),
        ("| true", PUBLISHED),
    ],
)
def test_the_report_fails_and_the_output_is_there(
    tmp_path: Path, src: Path, redirection: str, code: int
) -> None:
    """A script that nobody watches learns from the exit code that the output is there."""
    # as the installed program: Python opens the script under the lowest number that is free
    (tmp_path / "program.py").write_text("from mckpt.cli import process\nprocess()\n")
    words = [sys.executable, tmp_path / "program.py", "hf-to-megatron", src, tmp_path / "dst"]
    line = f"{shlex.join(map(str, words))} {redirection}; exit ${{PIPESTATUS[0]}}"
    said = run(["bash", "-c", line], code, env=os.environ | {"PYTHONPATH": str(ROOT)}).stderr
    assert "Traceback" not in said and "Exception" not in said, said
    if code and "2>&1" not in redirection:
        assert "dst/release: is complete and in place; stdout: cannot be written" in said
    good("hf-to-megatron", src, tmp_path / "whole")
    assert tree(tmp_path / "dst") == tree(tmp_path / "whole")


def test_a_result_that_cannot_be_printed_is_an_error(src: Path) -> None:
    line = shlex.join([*command_line("inspect", src)])
    said = run(["bash", "-c", f"{line} >/dev/full"], 7).stderr
    assert said == "mckpt: stdout: cannot be written: No space left on device\n"
    # head has read enough
    assert run(["bash", "-c", f"{line} | true; exit ${{PIPESTATUS[0]}}"], 7).stderr == ""


def test_a_job_goes_on_when_a_report_cannot_be_printed(
    tmp_path: Path, src: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    steps = (("hf-to-megatron", src, "m"), ("megatron-to-hf", "m", "h"))
    text = "".join(f"  - {{command: {c}, src: {a}, dst: {b}}}\n" for c, a, b in steps)
    job.write_text(f"steps:\n{text}")
    monkeypatch.chdir(tmp_path)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "argv", ["mckpt", "run", str(job)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        monkeypatch.undo()
        with pytest.raises(OSError):
            full.close()
    assert ended.value.code == PUBLISHED
    assert "2 steps done" in capsys.readouterr().err and (tmp_path / "h/config.json").exists()
