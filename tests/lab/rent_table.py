"""What goes wrong when machines are rented, one row each: exit status, seconds, what was said, what was left.

    python -m tests.lab.rent_table [--only NAME ...] [--jobs N] [--list]

Rows with containers really boot and ask; the others end before anything boots, so that nothing runs in them. Whatever
is done to a run in the middle of its life is done while that moment is held (rented.py).
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppsmoke.cluster.gathering import REACH_WITHIN_S
from tests.lab.fake_vast.faults import parse_fault
from tests.lab.jobs import in_order
from tests.lab.rented import Deed, Ended, Lab, nodes_of, rented, stage_of
from tests.lab.still_worker import continuation

FREEZE_S = 4  # instead of a minute and more, where a row waits for one of the run's own limits
GATED = {"STILL_FAULT": "gate@9"}  # after token 3 and before the last one, a worker waits for its gate
SOON = {"ppsmoke.rent.vast_fleet.WATCH_S": 2.0}  # looks at the account, well within the 15 s without a link


@dataclass(frozen=True)
class Row:
    """One fault. source: the row of the specification's section 6 ("6.n") or of the facts page's section 10 ("n").
    faults: of the fake's catalogue. says: words that the run's stderr must hold. rentals: how many instances it makes,
    None: any number. left: instances that the run itself may leave (a net then ends them). more: a further check."""

    name: str
    source: str
    status: int
    says: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    boots: bool = False
    arguments: tuple[str, ...] = ()
    patch: Mapping[str, Any] = field(default_factory=dict)
    worker: Mapping[str, str] = field(default_factory=dict)
    deeds: tuple[Deed, ...] = ()
    prepare: Callable[[Lab], None] | None = None
    more: Callable[[Lab, Ended], None] | None = None
    rentals: int | None = None
    left: bool = False
    key: str | None = None
    fake: Mapping[str, Any] = field(default_factory=dict)


def ours(lab: Lab, *, stage: int) -> int:
    """The id of the stage's latest live instance."""
    return [line for line in lab.fake.ledger()["live"] if stage_of(line["label"]) == stage][-1]["id"]


def strike(name: str) -> Callable[[Lab, subprocess.Popen[str]], None]:
    return lambda lab, run: lab.fake.strike(ours(lab, stage=1), name)


def hold(name: str) -> Callable[[Lab], None]:
    return lambda lab: lab.hold(name, stage=1)


def let_go_after_the_dials(lab: Lab, run: subprocess.Popen[str]) -> None:
    """Let stage 1's node start once more time has passed than is given to a node that listens."""
    threading.Timer(REACH_WITHIN_S + 1.0, lab.let_go, ["node"], {"stage": 1}).start()


def kill_node(lab: Lab, run: subprocess.Popen[str]) -> None:
    (node,) = nodes_of(lab, ours(lab, stage=1))
    os.kill(node, signal.SIGKILL)


def exited_for_two_looks(lab: Lab, run: subprocess.Popen[str]) -> None:
    """A stale status: the machine works all the time, and the answer goes on when it has been seen as exited twice."""
    instance_id, looks = ours(lab, stage=1), iter(range(10_000))
    lab.fake.cut(instance_id, status="exited")

    def hook(request: Any, _: int | None) -> None:
        if next(looks) == 2:
            lab.fake.cut(instance_id, status="running")
            lab.gate.unlink()

    lab.fake.on("list", "before", hook)


def stop_as_soon_as_it_exists(lab: Lab) -> None:
    """Stage 1's first machine, before its create is answered."""
    stopped: list[int] = []

    def hook(request: Any, instance_id: int | None) -> None:
        if instance_id and not stopped and stage_of(lab.fake.instance(instance_id).label) == 1:
            stopped.append(instance_id)
            lab.fake.strike(instance_id, "outbid")

    lab.fake.on("create", "after", hook)


def pull_for_ever(lab: Lab) -> None:
    """Hosts that show a sign of life at every look and are never done."""
    looks = iter(range(10_000))

    def hook(request: Any, instance_id: int | None) -> None:
        for line in lab.fake.ledger()["live"]:
            if lab.fake.instance(line["id"]).phase(lab.fake.clock.now()).status == "loading":
                lab.fake.cut(line["id"], msg=f"layer {next(looks)}: Pulling fs layer")

    lab.fake.on("list", "before", hook)


def clear(name: str) -> Callable[[Lab, Ended], None]:
    """What was left is ended by the reaper, once the fault is over."""

    def check(lab: Lab, ended: Ended) -> None:
        assert ended.ledger["live"], "nothing was left to the reaper"
        lab.fake.clear_fault(name)
        assert lab.settled() is not None, "the reaper did not end it"

    return check


def reports_two_hosts(lab: Lab, ended: Ended) -> None:
    hosts = [rental["host_id"] for rental in ended.json["rentals"]]
    assert len(set(hosts)) == len(hosts) == 2 and not ended.ledger["leaks"]


def replaced_once(lab: Lab, ended: Ended) -> None:
    rentals = ended.json["rentals"]
    assert [rental["ended"] for rental in rentals].count(None) == 0
    assert any(rental["generation"] == 1 for rental in rentals) and any(rental["failure"] for rental in rentals)


def answers_over(path: str) -> Callable[[Lab, Ended], None]:
    """The stages' own link has this path, and the answer is what any path must give."""

    def check(lab: Lab, ended: Ended) -> None:
        links = {frozenset((link["from"], link["to"])): link["path"] for link in ended.json["links"]}
        assert links[frozenset(("stage-0-of-2", "stage-1-of-2"))] == path, ended.json["links"]
        prompt, tokens = ended.json["prompt_token_ids"], ended.json["token_ids"]
        assert tokens == continuation(prompt, len(tokens)) and len(tokens) > 8, tokens

    return check


def names_the_stage_that_was_struck(lab: Lab, ended: Ended) -> None:
    assert re.match("ppsmoke: ask, stage 1: (its node|stage-1-of-2: )", ended.message), ended.stderr


ANOTHER = ("another host takes its place",)
NEXT = ("taking the next",)
FOUND = ("looking for it",)
ROWS = (
    Row("fewer than two offers", "6.1", 1, ("1 of 2 machines found",), ("search.one:always",), rentals=0),
    Row("no offers at all", "17", 1, ("0 of 2 machines found",), ("search.none:always",), rentals=0),
    Row("a create is rejected, the other is destroyed", "6.2", 1, ("insufficient_credit", "credit"),
        ("create.insufficient-credit:1:1",), rentals=1),
    Row("never running in sixty looks", "6.3", 1, ("not running after 60 looks",),
        ("machine.stuck-loading:always",), prepare=pull_for_ever, rentals=2),
    Row("the cluster never converges", "6.4", 1, ("gathering 3 members",), boots=True, prepare=hold("node"),
        patch={"ppsmoke.smoke.GATHER_BUDGET_S": FREEZE_S}, rentals=2),
    Row("a node takes long to start", "-", 0, boots=True, prepare=hold("node"), rentals=2,
        deeds=(Deed("stage 1: its node starts", let_go_after_the_dials),)),
    Row("a name never resolves", "6.5", 1, ("looking up pp-nobody",), boots=True,
        patch={"ppsmoke.smoke.ENTRY_NAME": "pp-nobody", "ppsmoke.smoke.RESOLVE_BUDGET_S": FREEZE_S}, rentals=2),
    Row("a worker never reports ready", "6.6", 1, ("nothing has moved for",), boots=True,
        patch={"ppsmoke.smoke.LOAD_SILENCE_S": FREEZE_S}, worker={"STILL_FAULT": "hang@load"}, rentals=2),
    Row("a worker fails to load", "6.6", 1, ("the model is bad, as asked",), boots=True,
        worker={"STILL_FAULT": "fail@load"}, rentals=2),
    Row("done, but no text", "6.7", 1, ("the answer is empty",), boots=True, worker={"STILL_EOG_AT": "1"}, rentals=2),
    Row("a node dies in mid-decode", "6.8", 1, boots=True, worker=GATED, arguments=("-v",),
        deeds=(Deed("token  3/", kill_node),), more=names_the_stage_that_was_struck, rentals=2),
    Row("a host dies in mid-decode", "6.8", 1, boots=True, worker=GATED, arguments=("-v",),
        deeds=(Deed("token  3/", strike("offline")),), more=names_the_stage_that_was_struck, rentals=2),
    Row("a destroy never succeeds, and the reaper does it later", "6.9", 1,
        ("NOT CONFIRMED", "reap --all", "vastai destroy instance"), ("destroy.502:always", "machine.manifest-unknown"),
        left=True, more=clear("destroy.502")),
    Row("offers are lost to others", "1", 0, NEXT, ("create.race-400", "create.race-404", "create.race-410"),
        boots=True, more=reports_two_hosts, rentals=2),
    Row("every offer is lost to others", "1", 1, ("offers could not be had",), ("create.race-410:always",), rentals=0),
    Row("429 on every route", "2", 0, (), ("search.429", "create.429", "list.429:2", "destroy.429:3", "show.429-json"),
        boots=True, rentals=2),
    Row("a GPU cannot be injected", "3", 0, ANOTHER, ("machine.cdi",), boots=True, more=replaced_once, rentals=3),
    Row("three GPUs cannot be injected", "3", 1, ("CDI", "2 hosts have been replaced"), ("machine.cdi:always",)),
    Row("lists fail while machines start", "4", 0, ("could not list",), ("list.reset:2:2", "list.null:1:4"), boots=True,
        patch={"ppsmoke.rent.account_view.LOOK_S": 0.5}, rentals=2),
    Row("the list's page is moved under the reader", "4", 0, (), ("list.empty-page", "list.moving:2:3"), boots=True),
    Row("redirects are refused", "5", 1, ("redirect",), ("any.redirect:always",), rentals=0),
    Row("the key is wrong", "6", 1, ("refused the key",), rentals=0, key="another-key-0123456789"),
    Row("the key is revoked while machines start", "6", 1, ("refused the key", "NOT CONFIRMED"),
        ("list.404-auth:always:1", "destroy.404-auth:always", "show.404-auth:always"), left=True),
    Row("a refused create has made an instance", "8", 1, ("invalid_price",),
        ("create.error-with-contract", "create.insufficient-credit:always"), rentals=1),
    Row("a create's reply is reset", "9", 0, FOUND, ("create.reset-after",), boots=True, rentals=2),
    Row("a create's reply is a 502", "9", 0, FOUND, ("create.502-after",), boots=True, rentals=2),
    Row("a create's reply is cut", "9", 0, FOUND, ("create.cut-after",), boots=True, rentals=2),
    Row("a create's reply is lost and the list lags", "9", 0, FOUND, ("create.reset-after", "list.lag:2:1"), boots=True,
        rentals=2),
    Row("a create that did nothing is unclear", "9", 1, ("no instance appeared",), ("create.502:always",), rentals=0,
        patch={"ppsmoke.rent.market.MAX_LOST": 2}),
    Row("an instance is not visible at once", "10", 0, (), ("create.invisible:2",), boots=True, rentals=2),
    Row("a host hangs while it pulls", "11", 0, ("stalled", *ANOTHER), ("machine.stuck-loading",), boots=True,
        more=replaced_once, rentals=3),
    Row("a host is never provisioned", "11", 0, ("stalled", *ANOTHER), ("machine.stuck-null",), boots=True, rentals=3),
    Row("the registry denies the image", "12", 1, ("the image is denied", "--image"), ("machine.pull-denied",)),
    Row("the image has no such tag", "12", 1, ("no such tag", "--image"), ("machine.manifest-unknown",)),
    Row("a registry limits a host's pulls", "12", 0, ("limits its pulls", *ANOTHER), ("machine.registry-limit",),
        boots=True, rentals=3),
    Row("a host maps no ports", "13", 0, ("without a port", *ANOTHER), ("machine.no-ports",), boots=True, rentals=3),
    Row("a host lacks one port", "13", 0, ("without a port", *ANOTHER), ("machine.port-missing",), boots=True,
        rentals=3),
    Row("nobody is behind a port", "13", 0, ("nobody of ours answers", *ANOTHER), ("machine.refusing",), boots=True,
        more=replaced_once, rentals=3, patch={"ppsmoke.rent.booting.NOBODY_S": 60.0}),
    Row("the start command cannot be executed", "15", 1, ("lacks the start command",), ("machine.oci",)),
    Row("variables and ports are dropped", "16", 0, ("without a port", *ANOTHER), ("create.env-dropped",), boots=True,
        rentals=3),
    Row("a filter is not applied", "18", 0, (), ("search.sloppy:2",), boots=True, more=reports_two_hosts, rentals=2),
    Row("the searches of today are used up", "19", 1, ("used up",), ("search.quota:always",), rentals=0),
    Row("outbid in mid-run", "21", 1, ("stopped without our asking",), boots=True, worker=GATED, patch=SOON,
        arguments=("-v",), deeds=(Deed("token  3/", strike("outbid")),), rentals=2),
    Row("stopped while it starts", "21", 0, ("stopped without our asking", *ANOTHER), boots=True, rentals=3,
        prepare=stop_as_soon_as_it_exists),
    Row("no credit at the create", "22", 1, ("insufficient_credit",), ("create.insufficient-credit:always",),
        rentals=0),
    Row("a new account's spending limit", "22", 1, ("spend_rate_limit",), ("create.spend-rate-limit:always",),
        rentals=0),
    Row("the account holds too little", "22", 1, ("the account holds $0.01",), fake={"credit": 0.01}, rentals=0),
    Row("the credit runs out in mid-run", "22", 1, ("stopped without our asking",), boots=True, worker=GATED,
        patch=SOON, arguments=("-v",), deeds=(Deed("token  3/", strike("credit-stop")),), rentals=2),
    Row("a host goes offline while it boots", "23", 0, ("offline", *ANOTHER), boots=True, rentals=3,
        prepare=hold("pip"), deeds=(Deed("stage 1: it has our code", strike("offline")),)),
    Row("a host vanishes in mid-run", "23", 1, ("vanished",), boots=True, worker=GATED, patch=SOON,
        arguments=("-v",), deeds=(Deed("token  3/", strike("vanish")),), rentals=2),
    Row("a false exited", "24", 0, ("its instance now shows exited",), boots=True, worker=GATED, patch=SOON,
        arguments=("-v",), rentals=2, deeds=(Deed("token  3/", exited_for_two_looks),)),
    Row("the run could cost more than allowed", "25", 1, ("and the limit is $0.002",), arguments=("--max-usd", "0.002"),
        rentals=0),
    Row("a destroy is taken and ignored", "27", 0, (), ("destroy.ignored:2",), boots=True, rentals=2),
    Row("a destroy fails, and so do the reads after it", "27", 0, (), ("destroy.502:2", "show.502:3", "show.null"),
        boots=True, rentals=2),
    Row("a baked image gets its certificates alone", "-", 0, (), boots=True, rentals=2,
        arguments=("--baked", "--image", "registry.example/ppsmoke:1")),
    Row("no two stages on one host", "28", 0, (), boots=True, more=reports_two_hosts, rentals=2),
    Row("the hosts drop UDP", "32", 0, (), ("machine.udp-filtered:2",), boots=True, more=answers_over("direct"),
        rentals=2),
    Row("the stages' mapped ports refuse each other", "-", 0, faults=("machine.no-hairpin:2",), boots=True,
        more=answers_over("relayed"), rentals=2),
    Row("a container has no key of its own", "26", 0, ("cannot end itself",), ("machine.no-key",), boots=True,
        rentals=2),
)  # fmt: skip


def run_row(row: Row, folder: Path) -> Ended:
    """Run it and check all that it claims. Raises AssertionError."""
    with rented(folder, boots=row.boots, worker=row.worker, **row.fake) as lab:
        for text in row.faults:
            name, count, skip = parse_fault(text)
            lab.fake.fault(name, count, skip=skip)
        if row.prepare is not None:
            row.prepare(lab)
        options = {"key": row.key} if row.key else {}
        ended = lab.run(*row.arguments, patch=row.patch, deeds=row.deeds, **options)
        check(row, ended)
        if row.more is not None:
            row.more(lab, ended)
    return ended


def check(row: Row, ended: Ended) -> None:
    said = ended.stderr
    assert ended.status == row.status, f"exit status {ended.status}\n{said}"
    assert not ended.undone, f"never said: {ended.undone}\n{said}"
    assert "Traceback" not in said and "fault of ppsmoke" not in said, said
    for words in row.says:
        assert words in said, f"{words!r} was not said\n{said}"
    live, over = ended.ledger["live"], ended.ledger["ended"]
    assert row.left or not live, f"left rented: {live}\n{said}"
    assert ended.ledger["decoys_touched"] == 0 and not ended.ledger["leaks"]
    assert row.rentals is None or len(live) + len(over) == row.rentals, f"{len(live) + len(over)} rentals\n{said}"
    assert ended.json["ok"] is (row.status == 0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="rows whose name holds one of these")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="rows at a time, each with a fake of its own")
    parser.add_argument("--list", action="store_true", help="print the rows' names")
    options = parser.parse_args(argv)
    rows = [row for row in ROWS if not options.only or any(words in row.name for words in options.only)]
    if options.list:
        print("\n".join(f"{row.source:5} {row.name}" for row in rows))
        return 0
    failed, began = 0, time.monotonic()
    print("| source | fault | exit | s | ledger empty | decoys touched | last words | as claimed |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for line in in_order(_line, [row.name for row in rows], jobs=options.jobs):
        print(line, flush=True)
        failed += not line.endswith("| yes |")
    print(f"\n{len(rows)} rows, {failed} not as claimed, in {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def _line(name: str) -> str:
    """The row of that name, run and printed."""
    row = next(row for row in ROWS if row.name == name)
    with tempfile.TemporaryDirectory(prefix="ppsmoke-rent-") as folder:
        try:
            ended = run_row(row, Path(folder))
        except Exception as error:
            return f"| {row.source} | {row.name} | | | | | | NO: {type(error).__name__}: {str(error)[:5000]} |"
    empty = "by its net" if ended.ledger["live"] else "yes"
    touched = ended.ledger["decoys_touched"]
    return (f"| {row.source} | {row.name} | {ended.status} | {ended.seconds:.1f} | {empty} | "
            f"{touched} | {ended.message[:150]} | yes |")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
