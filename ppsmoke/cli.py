"""The command line: arguments to settings, errors to text and exit status. The only place that prints either.

Exit status: 0 an answer was printed and everything has ended; 1 anything failed; 2 usage; 128 + n ended by signal n,
cleaned up. A clean-up that is not confirmed and a stdout that breaks are 1, whatever else happened.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from ppsmoke import __version__, models, smoke, vast_cli, vast_run
from ppsmoke.errors import DestroyFailed, InputError, Interrupted, SmokeError, UsageError, os_hint, printable
from ppsmoke.package import built_from, write_zipapp
from ppsmoke.rent.api_key import ApiKey
from ppsmoke.rent.loopback import LoopbackFleet
from ppsmoke.report.progress import NORMAL, QUIET, VERBOSE, Progress, open_log
from ppsmoke.report.summary import RunRecord
from ppsmoke.settings import LOOPBACK_MODEL, RENTED_MODEL, WIRE_DTYPES, RentSettings, Settings, state_dir
from ppsmoke.standard_streams import keep_standard_streams_open
from ppsmoke.worker import cache  # files only: loads neither numpy nor tinygrad

MAX_PROMPT_BYTES = 4 << 20  # thirty times the longest context
MAX_LINE = 1000  # characters of a line of an error; a server may have sent it
LAST_WORDS = 3  # lines of a failed child's stderr that are shown without -v
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

EXAMPLES = """\
examples:
  ppsmoke                                   two local stages, a small real model, "Say hello"
  ppsmoke --prompt "Why is the sky blue?" --max-tokens 100
  echo "Tell me a joke" | ppsmoke --prompt - --stages 3
  ppsmoke --model ./model.gguf --json | jq .timing
  ppsmoke --vastai                          the same on two rented GPUs; the key comes from VAST_API_KEY
  ppsmoke --vastai --dry-run --gpu RTX_4090 --region SE,DE
  ppsmoke package -o ppsmoke.pyz            one file that runs all of this with nothing installed but Python

exit status: 0 answered and everything ended; 1 failed; 2 usage; 130, 143, 129 interrupted and cleaned up
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    keep_standard_streams_open()
    try:
        status = _main(argv)
    except SystemExit as ended:  # argparse has shown its help, or what is wrong
        status = ended.code
    return _flushed(status)


def _main(argv: Sequence[str] | None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        _refuse_strangers(arguments, defaults=parser.parse_args([]))
        status = arguments.command(arguments)
        sys.stdout.flush()
        return status
    except SmokeError as error:
        if getattr(arguments, "as_json", False) and not isinstance(error, UsageError):
            record = RunRecord(run_id=None, model_name=arguments.model, num_stages=arguments.stages, error=error)
            _write_stdout(json.dumps(record.to_json()))
        _print_error(error, verbose=getattr(arguments, "verbosity", NORMAL) >= VERBOSE)
        return error.exit_status
    except OSError as error:  # whatever a subcommand prints: a run has its own care for it
        _silence(1)
        _print_error(SmokeError(f"stdout cannot be written: {error.strerror}"), verbose=False)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ppsmoke",
        description="Split a Llama model by layers over several nodes, ask it one thing, print the answer, and leave "
        "nothing running. Without a subcommand the nodes are processes on this machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_const", const=_show_version, dest="command", help="show it and exit")
    parser.set_defaults(command=_run, takes=())
    _add_run_options(parser)
    vast_cli.add_rent_options(parser)
    commands = parser.add_subparsers(title="subcommands", metavar="", dest="subcommand")
    node = commands.add_parser("node", help="be one stage's node; everything comes from the environment")
    node.set_defaults(command=_node)
    package = commands.add_parser("package", help="write this code as a single file that Python runs")
    package.add_argument("-o", "--output", type=Path, default=Path("ppsmoke.pyz"), metavar="FILE")
    package.set_defaults(command=_package)
    kept = commands.add_parser("cache", help="show the models kept on this machine, or remove them")
    kept.add_argument("action", nargs="?", choices=("show", "clear"), default="show")
    kept.set_defaults(command=_cache)
    vast_cli.add_commands(commands)
    return parser


def _refuse_strangers(arguments: argparse.Namespace, *, defaults: argparse.Namespace) -> None:
    """What stands before a subcommand and means nothing to it is refused: it would be ignored without a word."""
    known = {"command", "subcommand", "takes", "verbosity", *arguments.takes}
    for name in vars(defaults).keys() - known if arguments.subcommand else ():
        if getattr(arguments, name) != getattr(defaults, name):
            option = f"--{name.removeprefix('as_').replace('_', '-')}"
            raise UsageError(
                f"{option} means nothing to {arguments.subcommand}", hint=f"see ppsmoke {arguments.subcommand} --help"
            )


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", default=Settings.prompt, metavar="TEXT", help='what to ask; "-" reads stdin (default: %(default)r)')
    add("--raw", action="store_true", help="send the prompt as it is, without the model's chat template")
    add("--max-tokens", type=int, default=Settings.max_tokens, metavar="N", help="at most this many (default: 64)")
    names = ", ".join(models.MODELS)
    defaults = f"(default: {LOOPBACK_MODEL}; {RENTED_MODEL} with --vastai)"
    add("--model", metavar="M", help=f"{names}, a path, or an https URL of a GGUF file {defaults}")
    add("--stages", type=int, default=Settings.num_stages, metavar="N", help="nodes in the chain (default: 2)")
    add("--max-context", type=int, default=Settings.max_context, metavar="N", help="tokens of context (default: 2048)")
    add(
        "--wire-dtype",
        choices=WIRE_DTYPES,
        default=Settings.wire_dtype,
        help="activations between stages; float32 makes a split equal the whole (default: %(default)s)",
    )
    add("--device", default="", metavar="D", help="tinygrad's device, e.g. CPU or CUDA (default: each stage chooses)")
    add("--budget", type=float, default=Settings.budget_s, metavar="S", help="seconds for the run (default: 300)")
    add("--json", action="store_true", dest="as_json", help="print one JSON object instead of the bare answer")
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument(
        "-v", "--verbose", action="store_const", const=VERBOSE, dest="verbosity", default=NORMAL, help="show more"
    )
    loudness.add_argument("-q", "--quiet", action="store_const", const=QUIET, dest="verbosity", help="only errors")


def _show_version(_: argparse.Namespace) -> int:
    commit = _commit()
    print(f"ppsmoke {__version__}" + (f" ({commit[:12]})" if commit else ""))
    return 0


def _run(arguments: argparse.Namespace) -> int:
    """The main job. Prints the answer, or the JSON object; raises nothing that a run is known to raise."""
    rent, key = vast_cli.rent_settings(arguments), None
    if arguments.prompt == arguments.api_key == "-":
        raise UsageError("--prompt - and --api-key - both want stdin", hint="give the key with VAST_API_KEY")
    settings = Settings(
        prompt=_prompt(arguments.prompt),
        raw=arguments.raw,
        max_tokens=arguments.max_tokens,
        model=_model(arguments),
        num_stages=arguments.stages,
        max_context=arguments.max_context,
        wire_dtype=arguments.wire_dtype,
        device=arguments.device,
        budget_s=arguments.budget,
        verbosity=arguments.verbosity,
        as_json=arguments.as_json,
    )
    if rent is not None:
        vast_run.check(settings)
        key = vast_cli.find(arguments.api_key)
        if rent.dry_run:
            text, refusal = asyncio.run(vast_run.dry_run(settings, rent, key, _say_of(settings)))
            if refusal is not None:
                _print_error(refusal, verbose=False)
            return _print_answer(text, 0 if refusal is None else refusal.exit_status)
    record = RunRecord(run_id=settings.run_id, model_name=settings.model, num_stages=settings.num_stages)
    log = open_log(state_dir() / "logs", settings.run_id)
    progress = Progress(record, verbosity=settings.verbosity, log=log)
    logging.getLogger().handlers = [_ToProgress(progress)]  # asyncio's and the cluster's own words
    try:
        status = asyncio.run(_until_done_or_signalled(settings, progress, rent, key))
    finally:
        progress.close()
    if settings.as_json:
        status = _print_answer(json.dumps(record.to_json(), ensure_ascii=False), status)
    return status


def _say_of(settings: Settings) -> Callable[[str], None]:
    """For a line about what takes time, where there is no run."""
    return vast_cli.to_stderr if settings.verbosity >= NORMAL else lambda text: None


class _ToProgress(logging.Handler):
    """Log records as details of the run: in its log file always, on the terminal with -v."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).splitlines():
            self._progress.detail(f"{record.name}: {line}")


async def _until_done_or_signalled(
    settings: Settings, progress: Progress, rent: RentSettings | None, key: ApiKey | None
) -> int:
    """Run; the exit status. The first signal ends the run in good order, later ones only say what is still open."""
    loop = asyncio.get_running_loop()
    broken_stdout: list[OSError] = []
    signalled: list[Interrupted] = []

    def say(text: str) -> None:
        if not settings.as_json and not _write_stdout(text):
            broken_stdout.append(OSError())

    if rent is not None and key is not None:
        task = asyncio.ensure_future(vast_run.run(settings, rent, key, _commit(), progress, say))
    else:
        task = asyncio.ensure_future(smoke.run(settings, progress, _open_loopback, say))

    def on_signal(number: int) -> None:
        signalled.append(Interrupted(number, phase=progress.current_phase))
        if len(signalled) == 1:
            progress.say(f"{signal.Signals(number).name}: ending the stages")
            task.cancel()
        else:
            rented = ", ".join(map(str, progress.record.still_rented()))
            of_what = f"; not yet confirmed as ended: {rented}" if rented else ""
            progress.say(f"{signal.Signals(number).name} again: still ending the stages, please wait{of_what}")

    # One that we were started to ignore (nohup, a background job) stays ignored.
    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    for number in handled:
        loop.add_signal_handler(number, on_signal, number)
    try:
        await asyncio.wait({task})
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
    return _conclude(task, progress, signalled, stdout_broke=bool(broken_stdout))


def _conclude(
    task: asyncio.Future[None], progress: Progress, signalled: list[Interrupted], *, stdout_broke: bool
) -> int:
    """From how the run ended to what is said of it and the exit status."""
    error = None if task.cancelled() else task.exception()
    if signalled and not isinstance(error, DestroyFailed):
        error = signalled[0]
    if error is None and stdout_broke:
        error = SmokeError("the answer was there, but stdout could not be written", phase="print")
    if error is None:
        for line in progress.record.lines():
            progress.say(line)
        return 0
    if not isinstance(error, SmokeError):
        shown = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        hint = os_hint(error) or "this is a fault of ppsmoke's own"
        error = SmokeError(f"{type(error).__name__}: {error}", hint=hint, detail=shown)
    progress.record.error = error
    for line in error.detail.splitlines():
        progress.detail(f"  {line}")
    _print_error(error, verbose=False, log_path=progress.record.log_path)
    return error.exit_status if not stdout_broke else 1


def _open_loopback(progress: Progress) -> LoopbackFleet:
    return LoopbackFleet(on_line=progress.child_line)


def _model(arguments: argparse.Namespace) -> str:
    if arguments.model is not None:
        return arguments.model
    return RENTED_MODEL if arguments.vastai else LOOPBACK_MODEL


def _prompt(text: str) -> str:
    """The prompt itself, or stdin's where it is "-". Raises InputError for what is no UTF-8 or endless."""
    if text != "-":
        return text
    data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if not data:
        raise InputError("stdin held no prompt", hint="pipe a text in, or give it with --prompt TEXT")
    if len(data) > MAX_PROMPT_BYTES:
        raise InputError(f"the prompt on stdin is longer than {MAX_PROMPT_BYTES >> 20} MiB", hint="send less")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt on stdin is not valid UTF-8 (byte {error.start})", hint="convert it") from error


def _node(arguments: argparse.Namespace) -> int:
    from ppsmoke.stage_node import main as node_main  # a stage's code; nothing else needs it

    return node_main()


def _package(arguments: argparse.Namespace) -> int:
    try:
        size = write_zipapp(arguments.output, _commit())
    except OSError as error:
        raise InputError(f"cannot write {arguments.output}: {error.strerror}", hint="choose another -o") from error
    print(f"{arguments.output}: {size} bytes")
    return 0


def _commit() -> str:
    """The commit that a zipapp is made from: this zipapp's own, or the checkout's; "" where there is none."""
    if commit := built_from()["commit"]:
        return commit
    head = Path(__file__).resolve().parent.parent / ".git"
    try:
        text = (head / "HEAD").read_text().strip()
        return (head / text[5:]).read_text().strip() if text.startswith("ref: ") else text
    except OSError:
        return ""


def _cache(arguments: argparse.Namespace) -> int:
    entries = cache.entries()
    for entry in entries:
        print(f"{entry.bytes / 1e6:10.1f} MB  {entry.name}  {entry.path}")
    print(f"{sum(entry.bytes for entry in entries) / 1e6:10.1f} MB in {cache.cache_dir()}")
    if arguments.action == "clear":
        freed, left = cache.clear()
        print(f"{freed / 1e6:10.1f} MB removed")
        for entry in left:
            print(f"{entry.name} is in use and stays", file=sys.stderr)
        return 1 if left else 0
    return 0


def _write_stdout(text: str) -> bool:
    """Print a line; False where stdout is broken (then it is silenced, so that Python's exit does not complain)."""
    try:
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may be unable to show what a model says
        print(text, flush=True)
        return True
    except (OSError, ValueError):
        _silence(1)
        return False


def _print_answer(text: str, status: int) -> int:
    if _write_stdout(text):
        return status
    _print_error(SmokeError("stdout could not be written", phase="print"), verbose=False)
    return 1


def _silence(fd: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)


def _flushed(status: int) -> int:
    """Write out what the streams still hold: what Python could not write at its own end would be status 120."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _silence(1)
        status = status or 1
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        _silence(2)
    return status


def _print_error(error: SmokeError, *, verbose: bool, log_path: str | None = None) -> None:
    lines = [f"ppsmoke: {error}"]
    if error.hint:
        lines.append(f"  hint: {error.hint}")
    if log_path and not isinstance(error, (UsageError, InputError, Interrupted)):
        lines.append(f"  log: {log_path}")
    lines += error.detail.splitlines() if verbose else [f"  | {line}" for line in _last_words(error.detail)]
    try:
        print(printable("\n".join(line[:MAX_LINE] for line in lines)), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass


def _last_words(detail: str) -> list[str]:
    """The last lines of what a child printed, without the frames of a traceback, which only -v shows."""
    said = [line for line in detail.splitlines() if line.strip() and not line.startswith((" ", "\t", "Traceback"))]
    return [line[:300] for line in said[-LAST_WORDS:]]
