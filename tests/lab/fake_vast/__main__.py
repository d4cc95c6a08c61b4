"""The fake by hand: prints its URL on the first line of stdout and serves until it is interrupted."""

from __future__ import annotations

import argparse
import signal
import sys

from tests.lab.fake_vast.fake import FakeVast
from tests.lab.fake_vast.faults import catalogue, parse_fault


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
        key=options.key, port=options.port, scale=options.time_scale, enforce_limits=not options.no_limits
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
    parser.add_argument("--list-faults", action="store_true", help="print every fault with what it does")
    return parser


def _fault(text: str) -> tuple[str, int | None, int]:
    try:
        return parse_fault(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
