"""The fake by hand: prints its URL on the first line of stdout and serves until it is interrupted."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from tests.lab.fake_vast.fake import FakeVast
from tests.lab.fake_vast.faults import catalogue, parse_fault
from tests.lab.fake_vast.inside import Inside


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.list_faults:
        for name, what in catalogue().items():
            print(f"{name:32} {what}")
        return 0
    # Blocked before any thread starts, so that every thread inherits it and sigwait below alone takes them.
    ending = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    with FakeVast(
        key=options.key,
        port=options.port,
        scale=options.time_scale,
        enforce_limits=not options.no_limits,
        inside=None if options.no_containers else _inside(options),
        folder=options.folder,
    ) as fake:
        for name, count, skip in options.fault:
            fake.fault(name, count, skip=skip)
        print(fake.url, flush=True)
        signal.sigwait(ending)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.fake_vast", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; 0 (default): a free one")
    parser.add_argument("--key", default="test-key", help="the account's API key (default: %(default)s)")
    parser.add_argument("--fault", type=_fault, action="append", default=[], metavar="NAME[:COUNT[:SKIP]]",
                        help="arm a fault; COUNT is a number or 'always' (default 1); may be repeated")  # fmt: skip
    parser.add_argument("--time-scale", type=float, default=1.0, help="fake seconds per real second (default 1)")
    parser.add_argument("--no-limits", action="store_true", help="count calls that come too early, but answer them")
    inside = parser.add_argument_group("containers")
    inside.add_argument("--no-containers", action="store_true", help="instances are rows only; nothing runs")
    inside.add_argument(
        "--isolation",
        choices=["best", "namespace", "plain"],
        default="best",
        help="a namespace for each container, plain processes, or the best that works here (default)",
    )
    inside.add_argument("--folder", type=Path, help="where the containers' files go (default: a temporary folder)")
    inside.add_argument("--python", default=sys.executable, help="the interpreter under each container's environment")
    inside.add_argument("--wheels", type=Path, help="pip inside takes packages from this folder alone")
    inside.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for every container")
    inside.add_argument("--reach", action="append", default=[], metavar="HOST:PORT",
                        help="a loopback address of this machine that containers may reach")  # fmt: skip
    inside.add_argument("--chroot", action="store_true", help="a bare file system with what python:3.12-slim has")
    inside.add_argument("--inject", action="append", default=[], metavar="PATH", help="put this into the chroot")
    parser.add_argument("--list-faults", action="store_true", help="print every fault with what it does")
    return parser


def _inside(options: argparse.Namespace) -> Inside:
    return Inside(
        isolation=options.isolation,
        python=options.python,
        wheels=options.wheels and options.wheels.resolve(),
        env=dict(pair.split("=", 1) for pair in options.env),
        reach=tuple((host, int(port)) for host, _, port in (text.rpartition(":") for text in options.reach)),
        chroot=options.chroot,
        inject=tuple(options.inject),
    )


def _fault(text: str) -> tuple[str, int | None, int]:
    try:
        return parse_fault(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
