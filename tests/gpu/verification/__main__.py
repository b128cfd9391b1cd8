"""The commands; see the docstring of the package."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tests.gpu.verification import grid, large, machine, pages, training
from tests.gpu.verification.cases import ROOT, Json, Machine, one_case, results, run

KINDS: dict[str, Callable[[Json], Json]] = {
    "grid": grid.verify,
    "make": large.make,
    "convert": large.convert,
    "verify": large.verify,
    "start": training.start,
    "train": training.train,
    "back": training.back,
}
FOLDER = click.Path(path_type=Path, resolve_path=True)


def work_option(command: Callable[..., None]) -> Callable[..., None]:
    default = Path("/tmp/gpu-verification")
    return click.option("--work", type=FOLDER, default=default, show_default=True)(command)


def common(per_gpu: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of the commands that run cases."""
    options: list[Callable[..., Any]] = [
        work_option,
        click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda"),
        click.option("--gpus", type=int, help="GPUs to use, all by default; on a CPU 2 ranks."),
        click.option("--per-gpu", default=per_gpu, show_default=True, help="Cases on one GPU."),
        click.option("--limit-s", default=560.0, show_default=True, help="Stop after as long."),
        click.option("--only", default="", help="Run the cases whose name contains this."),
        click.option("--again", is_flag=True, help="Run cases that failed once more."),
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def set_up(
    work: Path, device: str, gpus: int | None, per_gpu: int, limit_s: float, only: str, again: bool
) -> Machine:
    deadline = time.monotonic() + limit_s
    work.mkdir(parents=True, exist_ok=True)
    here = machine.about(work, device)
    if device == "cpu":
        return Machine(device, gpus or 2, 1, deadline, only, again)
    return Machine(device, gpus or len(here["gpus"]), per_gpu, deadline, only, again)


@click.group()
def main() -> None:
    """Runs the verdict and training on GPUs, and writes docs/gpu-verification.md."""


@main.command("grid")
@common(grid.PER_GPU)
def run_grid(work: Path, **options: Any) -> None:
    """Every tiny model at every size, by both layer specs and from both formats."""
    here = set_up(work, **options)
    run("grid", grid.cases(work, here), work, here)


@main.command("large")
@common(large.PER_GPU)
@click.option("--space", type=FOLDER, help="Folder for the checkpoints, WORK/large by default.")
@click.option("--layers", type=int, help="Fewer layers, to rehearse.")
@click.option("--shrink", default=1, help="Divide the widths by this, to rehearse.")
def run_large(
    work: Path, space: Path | None, layers: int | None, shrink: int, **options: Any
) -> None:
    """A model of Llama-3.1-8B's shape; needs 50 GB, in /dev/shm to measure without a disk."""
    here = set_up(work, **options)
    run("large", large.cases(here, space or work / "large", shrink, layers), work, here)


@main.command("training")
@common(training.PER_GPU)
@click.option("--steps", default=60, show_default=True, help="Steps of the first run.")
@click.option("--more", default=10, show_default=True, help="Steps of the runs that go on.")
@click.option("--shrink", default=1, help="Divide the widths of the dense model, to rehearse.")
def run_training(work: Path, steps: int, more: int, shrink: int, **options: Any) -> None:
    """Train, reshard, go on, resume, convert back: the same losses at every size."""
    here = set_up(work, **options)
    run("training", training.cases(work, here, steps, more, shrink), work, here)


@main.command()
@work_option
@click.option("--to", type=FOLDER, default=ROOT / "docs", show_default="docs")
def write(work: Path, to: Path) -> None:
    """Write gpu-verification.md and gpu-verification-tables.md from WORK/results.jsonl."""
    found = results(work)
    to.mkdir(parents=True, exist_ok=True)
    (to / "gpu-verification.md").write_text(pages.summary(found))
    (to / "gpu-verification-tables.md").write_text(pages.tables(found))
    print(f"{to}: {len(found)} results")


@main.command("one-case", hidden=True)
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("path", type=click.Path(path_type=Path))
def run_one_case(kind: str, path: Path) -> None:
    one_case(KINDS[kind], path)


if __name__ == "__main__":
    main(prog_name="python -m tests.gpu.verification")
