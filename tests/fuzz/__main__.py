"""The command line of the fuzzer, and its table."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from tests.fuzz.parsers import PARSERS, make_corpus
from tests.fuzz.running import Finding, Ran, replay, run

CHUNK = 1000  # inputs of one process


@click.command()
@click.option("--inputs", default=20_000, help="Number of inputs, spread over the parsers.")
@click.option("--seed", default=0, help="Other seeds give other inputs.")
@click.option("--processes", default=1, help="Number of processes.")
@click.option("--parser", "names", multiple=True, type=click.Choice(list(PARSERS)))
@click.option("--replay", "again", help="Run one input, named as the table of findings names it.")
@click.option("--out", type=click.Path(path_type=Path), help="A folder for findings and the table.")
def main(
    inputs: int,
    seed: int,
    processes: int,
    names: tuple[str, ...],
    again: str | None,
    out: Path | None,
) -> None:
    """Damages checkpoints and requests at random, and reads them with every parser of mckpt."""
    # the corpus is small, and each input writes a file
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="mckpt-fuzz-", dir=memory) as directory:
        corpus = Path(directory) / "corpus"
        corpus.mkdir()
        make_corpus(corpus)
        if again is not None:
            name, own, number = again.split(":")
            replay(PARSERS[name], int(own), int(number), corpus, out)
            return
        sys.exit(_all(names or tuple(PARSERS), inputs, seed, processes, corpus, out))


def _all(
    names: tuple[str, ...], inputs: int, seed: int, processes: int, corpus: Path, out: Path | None
) -> int:
    """Runs the inputs of some parsers, prints the table and returns the exit code."""
    start, shares = time.monotonic(), sum(PARSERS[name].share for name in names)
    chunks = []
    for name in names:
        count = max(1, inputs * PARSERS[name].share // shares)
        chunks += [(name, range(at, min(at + CHUNK, count))) for at in range(0, count, CHUNK)]
    chunks.sort(key=lambda chunk: chunk[1].start)  # all parsers make progress
    ran = dict.fromkeys(names, Ran())
    with ThreadPoolExecutor(processes) as pool:
        done = pool.map(lambda chunk: run(PARSERS[chunk[0]], seed, chunk[1], corpus), chunks)
        for (name, _), found in zip(chunks, done, strict=True):
            ran[name] = ran[name].plus(found)
            for finding in found.findings:
                print(f"{finding.name}: {finding.what}", file=sys.stderr, flush=True)
                if out is not None:
                    _keep(finding, out)
    text = table(ran)
    text += f"\n{time.monotonic() - start:.0f} s with {processes} processes, seed {seed}\n"
    print(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "table.md").write_text(text)
    return 1 if any(r.findings for r in ran.values()) else 0


def _keep(finding: Finding, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "findings.jsonl", "a") as f:
        f.write(json.dumps({"replay": finding.name, **finding._asdict()}) + "\n")


def table(ran: dict[str, Ran]) -> str:
    """Returns the table of all parsers, and under it the kinds of findings."""
    rows = [
        "| parser | inputs | accepted | findings | slowest, ms | its number | memory, MiB |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    total = Ran()
    for one in ran.values():
        total = total.plus(one)
    for name, one in [*ran.items(), ("all", total)]:
        number = one.slowest_input if name in ran else ""
        rows.append(
            f"| {name} | {one.inputs:,} | {one.accepted:,} | {len(one.findings)} |"
            f" {one.slowest * 1000:,.0f} | {number} | {one.peak / 2**20:,.0f} |"
        )
    kinds: Counter[str] = Counter()
    first: dict[str, str] = {}
    for finding in total.findings:
        kind = finding.what.split(": '")[0].split(': "')[0]
        kinds[kind] += 1
        first.setdefault(kind, finding.name)
    found = [f"- {n} x {kind}, such as {first[kind]}" for kind, n in kinds.most_common()]
    return "\n".join([*rows, *([""] if found else []), *found, ""])


if __name__ == "__main__":
    main()
