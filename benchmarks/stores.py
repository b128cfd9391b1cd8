"""Measures conversions from and to an object store and the Hub, beside plain transfers of the same
bytes.

    python -m benchmarks.stores [DIRECTORY] [--rounds 3] [--only s3,hub]

The servers are those of the tests, on loopback, in processes of their own:
tests/helpers/s3_server.py and tests/helpers/hub_server.py. They share the cores with the process
that is measured. A plain transfer moves the same objects with obstore, in ranges and parts of 8 MiB
and 16 at a time, or, from the Hub, with snapshot_download of huggingface_hub. From store to store
it is a download and then an upload. mckpt and the plain transfer take turns; times are medians of
whole processes.

Needs 15 GB below DIRECTORY (/dev/shm).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.processes import MCKPT, ROOT, judge, missed, remove, run
from tests.helpers.s3_server import Server

MODEL = "llama-3.2-1b"
ALLOW = ["--allow-inexact", "rope_factor"]
PART = 8 << 20
AT_ONCE = 16
RATIO = 1 / 0.9  # of mckpt's time to that of the plain transfer, for 0.9 of its throughput
MEMORY = 200  # MiB
SELF = [sys.executable, "-m", "benchmarks.stores"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", nargs="?", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="s3,hub")
    parser.add_argument("--plain", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plain:
        what, *paths = arguments.plain
        {"down": down, "up": up, "hub": hub, "serve": serve}[what](*paths)
        return
    work = arguments.directory / "mckpt-benchmark-stores"
    remove(work)
    model = work / "hf"
    # in a process of its own, as in benchmarks/run
    make = [sys.executable, str(ROOT / "benchmarks" / "run"), "--make", MODEL, str(model), "full"]
    subprocess.run(make, check=True)
    os.environ["TMPDIR"] = str(work)
    print(
        f"{'work':<16}{'GB':>6}{'s':>7}{'plain s':>9}{'ratio':>7}{'range':>13}{'MiB':>5}"
        f"{'requests/GB':>13}"
    )
    try:
        if "s3" in arguments.only:
            s3(work, model, arguments.rounds)
        if "hub" in arguments.only:
            from_hub(work, model, arguments.rounds)
    finally:
        remove(work)
    print(f"\n{len(missed)} targets missed" + "".join(f"\n  {m}" for m in missed))
    sys.exit(1 if missed else 0)


def s3(work: Path, model: Path, rounds: int) -> None:
    server = Server(work / "objects")
    os.environ.update(server.environment())
    there, out, copy = "s3://b/hf", work / "out", work / "copy"
    convert = [*MCKPT, "hf-to-megatron"]
    download = [*SELF, "--plain", "down", "b", "hf", str(copy)]

    def clean() -> None:
        remove(out)
        for name, path in server.keys("b").items():
            if not name.startswith("hf/"):
                path.unlink()
        server.set()

    def requests() -> int:
        return len(server.control()["log"])

    try:
        server.put("b", model, "hf/")
        upload = [*SELF, "--plain", "up", str(model), "b", "copy"]
        for what, ours, plain in (
            ("S3 -> local", [*convert, there, str(out), *ALLOW], [download]),
            ("local -> S3", [*convert, str(model), "s3://b/out", *ALLOW], [upload]),
            ("S3 -> S3", [*convert, there, "s3://b/out", *ALLOW], [download, upload]),
        ):
            turns(what, model, ours, plain, rounds, clean, requests)
            remove(copy)
    finally:
        server.stop()


def from_hub(work: Path, model: Path, rounds: int) -> None:
    out, cache = work / "out", work / "cache"
    server = subprocess.Popen(
        [*SELF, "--plain", "serve", str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert server.stdout is not None and server.stdin is not None
    url = server.stdout.readline().decode().strip()
    os.environ |= {"HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}

    def clean() -> None:
        remove(out)
        remove(cache)

    def requests() -> int:
        assert server.stdout is not None and server.stdin is not None
        server.stdin.write(b"\n")
        server.stdin.flush()
        return int(server.stdout.readline())

    try:
        ours = [*MCKPT, "hf-to-megatron", "hf://org/model", str(out), "--stream", *ALLOW]
        turns("Hub -> local", model, ours, [[*SELF, "--plain", "hub"]], rounds, clean, requests)
    finally:
        server.kill()
        server.wait()


def turns(
    what: str,
    model: Path,
    ours: list[str],
    plain: Sequence[list[str]],
    rounds: int,
    clean: Callable[[], None],
    requests: Callable[[], int],
) -> None:
    """Runs both in turns, and prints a row."""
    nbytes = sum(path.stat().st_size for path in model.iterdir())
    times, beside, peak, asked = [], [], 0.0, 0
    for turn in range(rounds):
        for is_ours in (True, False) if turn % 2 == 0 else (False, True):
            clean()
            if not is_ours:
                beside.append(sum(run(command)[0] for command in plain))
                continue
            before = requests()
            seconds, memory = run(ours)
            asked = requests() - before
            times.append(seconds)
            peak = max(peak, memory)
    clean()
    time, other = statistics.median(times), statistics.median(beside)
    each = [a / b for a, b in zip(times, beside, strict=True)]
    print(
        f"{what:<16}{nbytes / 1e9:6.2f}{time:7.2f}{other:9.2f}{time / other:7.2f}"
        f"{min(each):7.2f}-{max(each):5.2f}{peak:5.0f}{asked / nbytes * 1e9:13.0f}"
        f"  {judge(what, time / other, round(RATIO, 2), ' x')},"
        f" {judge(what, peak, MEMORY, ' MiB')}",
        flush=True,
    )


# ---------------------------------------------------------------------------------- plain transfers


def down(bucket: str, prefix: str, folder: str) -> None:
    """Downloads the objects below a prefix in ranges."""
    import obstore

    store = obstore.store.S3Store(bucket, client_options={"allow_http": True})
    ranges = []
    for found in (one for page in obstore.list(store, prefix) for one in page):
        path = Path(folder) / Path(found["path"]).name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(found["size"])
        ranges += [(found["path"], path, at) for at in range(0, found["size"], PART)]

    def one(key: str, path: Path, at: int) -> None:
        data = obstore.get(store, key, options={"range": (at, at + PART)}).bytes()
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(data)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda args: one(*args), ranges))


def up(folder: str, bucket: str, prefix: str) -> None:
    """Uploads the files of a directory in parts."""
    import obstore

    store = obstore.store.S3Store(bucket, client_options={"allow_http": True})
    for path in Path(folder).iterdir():
        obstore.put(store, f"{prefix}/{path.name}", path, chunk_size=PART, max_concurrency=AT_ONCE)


def hub() -> None:
    """Downloads the model into the cache of huggingface_hub."""
    import huggingface_hub

    huggingface_hub.snapshot_download("org/model")


def serve(folder: str) -> None:
    """Runs the server of the Hub; prints its URL, and for each line the number of requests."""
    from tests.helpers.hub_server import serving

    with serving() as found:
        found.add("org/model", Path(folder))
        print(found.url, flush=True)
        for _ in sys.stdin:
            print(len(found.asked), flush=True)


if __name__ == "__main__":
    main()
