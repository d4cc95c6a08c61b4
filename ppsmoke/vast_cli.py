"""The command line's part about renting: its options, `reap`, `ls`, and `boot`, which a baked image begins with."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ppsmoke.errors import UsageError, printable
from ppsmoke.rent.api_key import ApiKey, find_key
from ppsmoke.rent.boot import main_baked
from ppsmoke.rent.ledger import read_journals
from ppsmoke.rent.reap import Finding, listed, ls_lines, settle, settled_lines, sort_out, to_json
from ppsmoke.rent.terms import DEFAULT_IMAGE
from ppsmoke.rent.vast_api import PATIENCE_S
from ppsmoke.settings import RentSettings, state_dir
from ppsmoke.vast_run import open_api

KEY_HELP = "the account's key; \"-\" reads a line of stdin (default: VAST_API_KEY, then the official client's key file)"


def add_rent_options(parser: argparse.ArgumentParser) -> None:
    """--vastai and what goes with it."""
    group = parser.add_argument_group("on rented GPUs")
    add = group.add_argument
    add("--vastai", action="store_true", help="rent a GPU for each stage on vast.ai, and destroy them at the end")
    add("--api-key", metavar="KEY", help=KEY_HELP)
    add("--gpu", default="", metavar="G", help="e.g. RTX_4090 (default: the cheapest that fits)")
    add("--max-dph", type=float, default=RentSettings.max_dph, metavar="USD", help="$/h of a machine (default: 1)")
    add("--max-usd", type=float, default=RentSettings.max_usd, metavar="USD",
        help="refuse a run that could cost more, replaced hosts included (default: 1)")  # fmt: skip
    add("--region", default="", metavar="CC,CC", help="two-letter country codes (default: anywhere)")
    add("--min-reliability", type=float, default=RentSettings.min_reliability, metavar="R", help="default: 0.98")
    add("--disk", type=float, default=RentSettings.disk_gb, metavar="GB", help="of each machine (default: 16)")
    add("--image", default="", metavar="NAME", help=f"a container image with Python and pip (default: {DEFAULT_IMAGE})")
    add("--baked", action="store_true", help="the image holds ppsmoke, tinygrad and numpy (see Dockerfile)")
    add("--yes", action="store_true", help="do not ask before renting")
    add(
        "--dry-run",
        action="store_true",
        help="print the plan and what it can cost; rent nothing (exit status 1 where a run would refuse it)",
    )


def add_commands(commands: argparse._SubParsersAction) -> None:
    reap = commands.add_parser(
        "reap", help="end what dead runs have left rented on vast.ai, and say what else is there"
    )
    reap.add_argument("--dry-run", action="store_true", default=argparse.SUPPRESS, help="only say what would be ended")
    reap.add_argument("--all", action="store_true", help="ask about everything else whose label starts like ours, too")
    reap.add_argument("--yes", action="store_true", default=argparse.SUPPRESS, help="with --all: do not ask")
    reap.add_argument("--api-key", metavar="KEY", default=argparse.SUPPRESS, help=KEY_HELP)
    reap.set_defaults(command=_reap, takes=("vastai", "dry_run", "yes", "api_key"))
    ls = commands.add_parser(
        "ls", help="what this machine's runs rent on vast.ai now, and others under our name; what it costs an hour"
    )
    ls.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, dest="as_json", help="a JSON list, a row each"
    )
    ls.add_argument("--api-key", metavar="KEY", default=argparse.SUPPRESS, help=KEY_HELP)
    ls.set_defaults(command=_ls, takes=("vastai", "as_json", "api_key"))
    boot = commands.add_parser("boot", help="be process 1 of a rented container whose image holds this code")
    boot.set_defaults(command=lambda arguments: main_baked())


def rent_settings(arguments: argparse.Namespace) -> RentSettings | None:
    """None without --vastai. Raises UsageError for what does not fit together."""
    if not arguments.vastai:
        alone = argparse.ArgumentParser()
        add_rent_options(alone)
        for name, default in vars(alone.parse_args([])).items():
            if getattr(arguments, name) != default:
                raise UsageError(f"--{name.replace('_', '-')} without --vastai", hint="add --vastai to rent machines")
        return None
    return RentSettings(
        gpu=arguments.gpu,
        max_dph=arguments.max_dph,
        regions=tuple(part.strip().upper() for part in arguments.region.split(",") if part.strip()),
        min_reliability=arguments.min_reliability,
        disk_gb=arguments.disk,
        max_usd=arguments.max_usd,
        image=arguments.image,
        baked=arguments.baked,
        confirm="yes" if arguments.yes else "ask",
        dry_run=arguments.dry_run,
    )


def find(argument: str | None) -> ApiKey:
    """The account's key. Raises UsageError where there is none."""
    key, _ = find_key(argument, environ=os.environ, home=Path.home(), read_stdin=_line_of_stdin)
    return key


def to_stderr(text: str) -> None:
    """A line for whoever waits."""
    with suppress(OSError, ValueError):
        print(f"ppsmoke: {printable(text)}", file=sys.stderr, flush=True)


def _line_of_stdin() -> str:
    """A line of stdin; on a terminal it is asked for, and not shown while it is typed."""
    if not sys.stdin.isatty():
        return sys.stdin.readline()
    try:
        return getpass.getpass("vast.ai API key: ")
    except EOFError:
        return ""


def _reap(arguments: argparse.Namespace) -> int:
    api = open_api(find(arguments.api_key), to_stderr, patience_s=PATIENCE_S)

    def choose_more(found: Sequence[Finding]) -> Sequence[Finding]:
        print("also on this account, and not provably a dead run's of this state folder:", file=sys.stderr)
        for line in listed(found, now=api.clock.wall()):
            print(f"  {line}", file=sys.stderr)
        if arguments.yes:
            return found
        print("end these too, whoever they belong to? [y/N] ", end="", file=sys.stderr, flush=True)
        typed = sys.stdin.readline()
        if not typed:
            print("nobody answers: left alone (--yes takes it as said)", file=sys.stderr)
        return found if typed.strip().lower() in ("y", "yes") else []

    settling = settle(
        api,
        state_dir(),
        dry_run=arguments.dry_run,
        choose_more=choose_more if arguments.all else None,
        say=to_stderr,
    )
    try:
        settled = asyncio.run(settling)
    except KeyboardInterrupt:
        to_stderr("interrupted; what was not seen gone may still be rented: run reap again")
        raise
    print("\n".join(settled_lines(settled, dry_run=arguments.dry_run)))
    return 1 if settled.outcome.leftovers else 0


def _ls(arguments: argparse.Namespace) -> int:
    api = open_api(find(arguments.api_key), to_stderr, patience_s=PATIENCE_S)
    listing = asyncio.run(api.instances())
    now = api.clock.wall()
    findings = sort_out(listing, read_journals(state_dir()), now=now)
    shown = json.dumps(to_json(findings, now=now)) if arguments.as_json else "\n".join(ls_lines(findings, now=now))
    print(shown)
    return 0
