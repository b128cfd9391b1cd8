"""The `mckpt` program: its commands, and the exit code of every error."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from contextlib import suppress
from typing import Any

import click

from mckpt import errors
from mckpt.cli import terminal
from mckpt.cli.commands import Commands, Imported, Summary, own_name, refuse_unknown, set_by
from mckpt.cli.terminal import document, echo
from mckpt.errors import MckptError, StorageError, Unprinted, UsageError
from mckpt.version import __version__

INTERNAL_ERROR = 70
SIGNALLED = 128  # the exit code of an interrupted command, less the number of the signal


# Their order is that of the error for an unknown command.
COMMANDS = {
    "hf-to-megatron": Summary(
        "convert.hf_to_megatron", "Convert a Hugging Face directory to Megatron."
    ),
    "megatron-to-hf": Summary(
        "convert.megatron_to_hf", "Convert a Megatron checkpoint to Hugging Face."
    ),
    "reshard": Summary(
        "convert.reshard", "Change the sizes or the format of a Megatron checkpoint."
    ),
    "repair": Summary("convert.repair", "Make a training checkpoint loadable at any sizes."),
    "edit": Summary("edit.edit", "Write a checkpoint of another shape."),
    "merge": Summary("merge.merge", "Merge several checkpoints of one model."),
    "delta": Summary("delta.delta", "Write what changed between two checkpoints."),
    "apply": Summary("delta.apply", "Apply deltas to a checkpoint."),
    "adapter": Summary("adapter.adapter", "Merge, convert or inspect an adapter (LoRA)."),
    "plan": Summary("convert.plan", "Print the plan of a conversion; write nothing."),
    "inspect": Summary("inspect.inspect", "Print what a directory contains."),
    "check": Summary("check.check", "Read a whole checkpoint and report what is wrong with it."),
    "diff": Summary("diff.diff", "Compare two checkpoints tensor by tensor."),
    "verify": Summary("verify.verify", "Check that two checkpoints hold the same model."),
    "train": Summary("train.train", "Train a Megatron checkpoint on Megatron-Core."),
    "push": Summary("push.push", "Upload a Hugging Face directory to the Hub."),
    "run": Summary("job.run_job", "Run the commands of a job file, one after the other."),
    "mappings": Summary("mappings.mappings", "List, show or check mapping files."),
    "doctor": Summary("doctor.doctor", "Print what is installed and found on this machine."),
}


class _Program(Commands):
    """All commands of mckpt."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            # click would print an empty line for it, which --json must not have
            if sys.stderr.isatty() and not _wants_json():
                echo("", err=True)  # behind ^C
            raise click.exceptions.Abort from error


@click.group(
    cls=_Program,
    commands=Imported(COMMANDS),
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 120,
        "show_default": True,
        "token_normalize_func": own_name,
    },
)
@click.version_option(__version__, message="mckpt %(version)s")
def cli() -> None:
    """Convert LLM checkpoints between Hugging Face and Megatron, reshard and verify them.

    Every option can also be set by an environment variable: --max-memory by MCKPT_MAX_MEMORY.
    """
    refuse_unknown(cli)


def main() -> None:
    """Runs `mckpt`, reports an error on stderr, and exits with its code (docs/exit-codes.md)."""
    # numpy starts a thread for each core when it is imported, and mckpt uses none of them
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A plan has 10**6 objects that live until the end. Walking them in each collection took a tenth
    # of the time.
    gc.set_threshold(10_000_000)
    before = errors.show_options(True)
    try:
        with terminal.raising():
            code = cli(prog_name="mckpt", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt) as error:
        code = _interrupted(error)
    except click.ClickException as error:
        code = _wrong_usage(error)
    except Unprinted as error:
        broken = isinstance(error.__cause__, BrokenPipeError)  # such as head, which has read enough
        code = (
            _broken_pipe() if broken else _fail("StorageError", *error.args, code=error.exit_code)
        )
    except MckptError as error:
        more = {"problems": error.problems} if error.problems else {}
        code = _fail(type(error).__name__, *error.args, code=error.exit_code, **more)
    except SystemExit as error:
        # Shell completion exits with 0. click also turns a broken pipe into an exit with 1, which
        # is the code of `diff` for a difference.
        code = _broken_pipe() if error.code else 0
    except OSError as error:
        what = f"{error.filename or 'input/output'}: {error.strerror or error}"
        code = _fail("StorageError", what, code=StorageError.exit_code)
    except Exception as error:
        code = _internal_error(error)
    finally:
        errors.show_options(before)
        # without importing it for a command that reads no store
        if (sparse_copy := sys.modules.get("mckpt.storage.sparse_copy")) is not None:
            sparse_copy.clean()
    sys.exit(code if isinstance(code, int) else 0)


def process() -> None:
    """Runs `main` and ends the process at once.

    Freeing the 10**6 objects of a plan one by one would take a tenth of the time of the run.
    """
    terminal.open_streams()
    try:
        main()
    except SystemExit as error:
        with suppress(OSError):  # nobody reads the output any more
            sys.stdout.flush()
            sys.stderr.flush()
        atexit._run_exitfuncs()  # which `_exit` leaves out: they remove temporary files
        os._exit(error.code if isinstance(error.code, int) else 0)
    except KeyboardInterrupt:  # Ctrl-C once more
        os._exit(SIGNALLED + signal.SIGINT)


def _interrupted(error: BaseException) -> int:
    """Reports a signal; click makes its Abort of the exception that the signal raised."""
    cause = error.__cause__ or error
    number = cause.number if isinstance(cause, terminal.Interrupted) else signal.SIGINT
    resumable = {
        "hf-to-megatron",
        "megatron-to-hf",
        "reshard",
        "repair",
        "delta",
        "apply",
        "run",
    } & set(sys.argv[1:2])
    cure = "; the same command continues where it stopped" if resumable else ""
    name = signal.Signals(number).name
    return _fail("Interrupted", f"interrupted by {name}{cure}", code=SIGNALLED + number)


def _wrong_usage(error: click.ClickException) -> int:
    """Reports an error that click found in the arguments or in an environment variable."""
    variable = set_by(error.param, error.ctx) if isinstance(error, click.BadParameter) else None
    origin = f" (from the environment variable {variable})" if variable else ""
    if not _wants_json():
        if _is_help(error):
            document(error.format_message(), err=True)
        else:
            ctx = error.ctx if isinstance(error, click.UsageError) else None
            if ctx is not None:
                document(
                    f"{ctx.get_usage()}\nTry '{ctx.command_path} --help' for help.\n\n", err=True
                )
            echo(f"Error: {error.format_message()}", err=True)
        if origin:
            echo(origin.strip(), err=True)
        return error.exit_code
    kind = UsageError if isinstance(error, click.UsageError) else type(error)
    return _fail(kind.__name__, error.format_message() + origin, code=error.exit_code)


def _is_help(error: click.ClickException) -> bool:
    """Returns whether the message is the help, which a group without a command prints."""
    return isinstance(error, click.UsageError) and bool(
        error.ctx and error.message == error.ctx.get_help()
    )


def _wants_json() -> bool:
    return "--json" in sys.argv or os.environ.get("MCKPT_JSON", "0").lower() in ("1", "true", "yes")


def _broken_pipe() -> int:
    # nobody reads stdout any more, and the interpreter would report that once more when it exits
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return StorageError.exit_code


def _internal_error(error: Exception) -> int:
    """Reports a bug of mckpt with its traceback."""
    import textwrap
    import traceback

    if _wants_json():
        return _fail(
            "InternalError",
            f"internal error: {type(error).__name__}: {error}; please report it",
            code=INTERNAL_ERROR,
            traceback=traceback.format_exc(),
        )
    # its last lines may be a text of the checkpoint, so no line begins as one of mckpt does
    document(textwrap.indent(traceback.format_exc(), "  "), err=True)
    message = "internal error: please report it with the lines above"
    return _fail("InternalError", message, code=INTERNAL_ERROR)


def _fail(kind: str, *lines: str, code: int, **more: Any) -> int:
    """Prints the lines of an error on stderr, as one JSON object if the arguments contain --json.

    Returns `code`.
    """
    if _wants_json():
        import json

        error = {"class": kind, "message": "\n".join(lines), "exit_code": code, **more}
        echo(json.dumps({"error": error}), err=True)
    else:
        first, *rest = lines
        echo(f"mckpt: {first}", *rest, err=True)
    return code
