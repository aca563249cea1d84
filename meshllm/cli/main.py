"""The command `meshllm`: which commands there are, exit codes, signals. A command's module is imported when it runs.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no daemon, 4 no model, 130 interrupted, 143 terminated. An error is one
line on stderr that names the thing and says what to do; --verbose adds the traceback. stdout is UTF-8 in every locale.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import click

from meshllm import __version__
from meshllm.errors import MeshLLMError

# command -> module that holds it under the same name, and the line in the list of commands
COMMANDS: dict[str, tuple[str, str]] = {
    "ask": ("meshllm.cli.ask", "Answer one question; the text streams to stdout."),
    "chat": ("meshllm.cli.chat", "Talk, with the conversation kept."),
    "status": ("meshllm.cli.status", "Show the devices of the mesh and who holds what."),
    "pull": ("meshllm.cli.models", "Get a model, or register a file."),
    "models": ("meshllm.cli.models", "List the models of this device."),
    "key": ("meshllm.cli.key", "Make, show or set the secret that makes a mesh."),
    "daemon": ("meshllm.cli.daemon", "Run this device's part; what systemd starts."),
    "plan": ("meshllm.cli.plan", "Show the layout that devices would get, real or not."),
    "doctor": ("meshllm.cli.doctor", "Look for what is wrong on this device."),
    "bench": ("meshllm.cli.bench", "Measure prompt and decode speed."),
    "tokenize": ("meshllm.cli.models", "Turn texts into token ids with a model file."),
}
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
STDOUT = "standard output"  # as errors name it


class Interrupted(BaseException):
    """SIGINT or SIGTERM came; `code` is what the process exits with. Not an Exception: nothing may swallow it."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for: `--version` must not pay for them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands without importing one."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="meshllm %(version)s")
@click.option("-v", "--verbose", is_flag=True, help="Show the whole story of an error.")
def cli(verbose: bool) -> None:
    """Turns the computers you already own into one machine for running language models."""


def _raise_interrupted(number: int, frame: FrameType | None) -> None:
    # Whoever interrupts twice has been heard the first time; a second one must not break the way out.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Interrupted(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED)


class _Stdout(io.TextIOWrapper):
    """Standard output, whose errors name it: a full disk may as well be another file's.

    Not at the level of bytes: a signal's exception there, after the system has written, would have them written twice.
    """

    def write(self, text: str, /) -> int:
        with _naming_stdout():
            return super().write(text)

    def flush(self) -> None:
        with _naming_stdout():
            super().flush()


@contextlib.contextmanager
def _naming_stdout() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = STDOUT
        raise


def _prepare_process() -> None:
    signal.signal(signal.SIGINT, _raise_interrupted)
    signal.signal(signal.SIGTERM, _raise_interrupted)
    if not isinstance(sys.stdout, io.TextIOWrapper):  # closed (>&-): nobody wants what is written
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for as long as the process
    else:
        lines = sys.stdout.line_buffering
        sys.stdout = _Stdout(sys.stdout.buffer, encoding="utf-8", errors="replace", line_buffering=lines)
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(encoding="utf-8", errors="replace")


def _say(message: str) -> None:
    line = " ".join(str(message).split())
    with contextlib.suppress(OSError, ValueError):  # nobody listens on stderr: the exit code still tells
        print(f"meshllm: {line}", file=sys.stderr)


def _mute_stdout() -> None:
    """After stdout has failed: what is left in its buffer must not raise again at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _run(arguments: Sequence[str]) -> int:
    try:
        if "_MESHLLM_COMPLETE" in os.environ:
            cli.main(prog_name="meshllm")
        # What click's own main does, without its answer to a closed pipe.
        with cli.make_context("meshllm", list(arguments)) as context:
            result = cli.invoke(context)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.UsageError as error:
        hint = f" (see: {error.ctx.command_path} --help)" if error.ctx is not None else ""
        _say(error.format_message() + hint)
        return 2
    except click.ClickException as error:
        _say(error.format_message())
        return 1
    except MeshLLMError as error:
        _say(str(error))
        return error.exit_code
    except BrokenPipeError:
        _mute_stdout()
        return 0  # `| head` has what it wanted
    except (Interrupted, click.Abort, KeyboardInterrupt) as stop:
        return stop.code if isinstance(stop, Interrupted) else EXIT_INTERRUPTED


def _guarded(run: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """What `run` returns; an error of ours that nobody foresaw is one line too."""
    try:
        return run(arguments)
    except OSError as error:
        if error.filename == STDOUT:
            _mute_stdout()
        name = f"{error.filename}: " if error.filename else ""
        _say(f"{name}{error.strerror or error}")
    except Exception as error:
        _say(f"internal error: {type(error).__name__}: {error} (run with --verbose and report it)")
    return 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits."""
    chosen = sys.argv[1:] if arguments is None else arguments
    _prepare_process()
    verbose = any(word in ("-v", "--verbose") for word in chosen[:1])
    code = _run(chosen) if verbose else _guarded(_run, chosen)
    sys.exit(code)


if __name__ == "__main__":
    main()
