"""A plan with the methods that run it. The modules that do so are imported on first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mckpt.conversion.plan_data import PlanData
from mckpt.execute.ranks import Ranks
from mckpt.progress import OnProgress, watched
from mckpt.storage import sparse_copy
from mckpt.values.sizes import parse_size

if TYPE_CHECKING:
    from threading import Event

    from mckpt.conversion.done import Verdict


class Plan(PlanData):
    """A conversion that is proved from headers alone. Nothing is written before `run`."""

    def judge(self, tell: Callable[[str], None] = lambda text: None) -> Verdict:
        """Decides whether the destination already holds the output of `run`.

        The files of the source count as the same if their size, mtime, ctime and inode are; else
        their content is compared with the destination. Checksums of the destination are not
        compared; `mckpt check` does so. tell: called with a note before a comparison.
        """
        from mckpt.conversion.done import judge

        return judge(self, tell=tell)

    def settle(self, verdict: Verdict) -> None:
        """Completes a run that was killed at its end, and records that the source in a `verdict` of
        `judge` is the source of the destination.
        """
        from mckpt.conversion.done import settle

        settle(self, verdict)

    def check(self, check_replicas: bool = False) -> list[str]:
        """Raises the error that `run` would raise before it moves a byte; returns sentences on the
        values that it would drop.

        Reads the padding of the vocabulary, and the tensors that have copies.
        """
        from mckpt.conversion.moving import dropped

        self.destination.check()
        self.side.check_unchanged()
        return dropped(self, check_replicas)

    def run(
        self,
        *,
        max_memory: int | str = "64MiB",
        threads: int = 0,
        checksum: str = "crc32",
        allow_overflow: bool = False,
        resume: bool = True,
        check_replicas: bool = False,
        ranks: Ranks | None = None,
        engine: str = "local",
        progress: OnProgress | None = None,
        cancel: Event | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> dict[str, Any]:
        """Writes the checkpoint and returns the manifest.

        If a run is interrupted, the same call continues it, unless `resume` is False. Several
        processes share the work if each calls this with its own `ranks`; all of them return when
        the checkpoint is published.

        max_memory: bytes of all buffers together, or text such as "64MiB". threads: 0 means one per
        core. engine: "ray" lets the nodes of a Ray cluster copy (docs/scale.md); both numbers are
        then those of each process there. tell: called with notes for the user that are not errors.
        """
        from mckpt.conversion.moving import RunSettings, cluster_of

        if sparse_copy.of(self.destination.root) is None:
            from mckpt.conversion.run import run
        else:
            from mckpt.conversion.to_store import run
        how = RunSettings(
            parse_size(max_memory, "--max-memory"),
            threads,
            checksum,
            allow_overflow,
            resume,
            check_replicas,
            cluster_of(engine),
            watched(progress, cancel),
            tell,
        )
        return run(self, how, ranks or Ranks())
