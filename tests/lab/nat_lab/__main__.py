"""python -m tests.lab.nat_lab --list | --selftest: the kinds of routers, and whether each does what its name says."""

from __future__ import annotations

import argparse
import sys
import time

from tests.lab.nat_lab import punching, selftest
from tests.lab.nat_lab.lab import why_not
from tests.lab.nat_lab.nat_types import NAT_TYPES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.nat_lab", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="the kinds of routers")
    what.add_argument("--selftest", action="store_true", help="measure each with sockets; 1 if one is not what it says")
    if parser.parse_args().list:
        for name, kind in NAT_TYPES.items():
            print(f"{name:18} public port: {kind.ports:15} unsolicited: {kind.unsolicited}")
        return 0
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    began = time.monotonic()
    table, agrees = selftest.report(selftest.measure(NAT_TYPES))
    matrix, punches = punching.report(punching.punch())
    verdict = "as intended" if agrees and punches else "NOT as intended"
    print(f"{table}\n\nTCP simultaneous open, bare sockets, one try:\n{matrix}\n")
    print(f"{len(NAT_TYPES)} types in {time.monotonic() - began:.1f} s: {verdict}")
    return 0 if agrees and punches else 1


if __name__ == "__main__":
    sys.exit(main())
