"""The NAT lab itself: its routers do what they say, its cables can be spoiled and cut, and nothing of it stays."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from tests.lab.nat_lab import lab as lab_module
from tests.lab.nat_lab import punching, selftest
from tests.lab.nat_lab.expected import NAMED
from tests.lab.nat_lab.hand import Hand
from tests.lab.nat_lab.kernel import NETNS, LabError
from tests.lab.nat_lab.lab import PIPE, ROOT, NatLab, why_not
from tests.lab.nat_lab.nat_types import NAT_TYPES
from tests.lab.nat_lab.selftest import ARRIVAL_S, SILENCE_S
from tests.lab.nat_lab.spec import Site, sites_from, sites_of
from tests.lab.processes import is_alive, until

needs_lab = pytest.mark.skipif(bool(why_not()), reason=why_not() or "the lab runs")


@pytest.fixture(scope="module")
def measured():
    return selftest.measure(NAT_TYPES)


@pytest.mark.slow
@needs_lab
@pytest.mark.parametrize("nat", NAT_TYPES)
def test_a_router_behaves_as_its_type_says(measured, nat):
    assert measured[nat] == selftest.intended(nat)


@needs_lab
@pytest.mark.slow
def test_a_simultaneous_open_gets_through_exactly_where_the_expected_table_says_so():
    found = punching.punch()
    assert found == {pair: punching.punchable(*pair) for pair in found}
    assert any(found.values()) and not all(found.values())


@contextmanager
def two_hosts(**options):
    """Two open hosts, a hand in each, a UDP socket "s" at port 7000 each."""
    with NatLab(sites_from({"a": "open", "b": "open"}), **options) as lab:
        a, b = Hand(lab.node("a")), Hand(lab.node("b"))
        for hand in (a, b):
            hand.bind("s", 7000)
        yield lab, a, b


def send(lab, a, b, text="hello"):
    a.send("s", (lab.host(b.name).public, 7000), text)


@pytest.mark.slow
@needs_lab
def test_a_delay_is_what_a_packet_takes_in_both_directions():
    with two_hosts() as (lab, a, b):
        lab.edge("a").set(delay_ms=60)
        lab.edge("b").set(delay_ms=40, direction="down")
        began = time.monotonic()
        send(lab, a, b)
        assert b.receive("s", ARRIVAL_S)
        assert time.monotonic() - began >= 0.1
        began = time.monotonic()
        send(lab, b, a)
        assert a.receive("s", ARRIVAL_S)
        assert time.monotonic() - began >= 0.06
        assert lab.edge("b").conditions("up").delay_ms == 0


@needs_lab
def test_a_cut_cable_passes_nothing_until_it_is_healed():
    with two_hosts() as (lab, a, b):
        lab.cut("a")
        send(lab, a, b, "lost")
        send(lab, b, a, "lost")
        until(lambda: {way["lost"] for way in lab.edge("a").counts().values()} == {1}, within_s=ARRIVAL_S)
        lab.heal("a")
        send(lab, a, b, "after")
        assert b.receive("s", ARRIVAL_S)[0] == "after"
        assert a.receive("s", 0.0) is None


@pytest.mark.slow
@needs_lab
def test_what_is_under_way_is_lost_when_the_cable_is_cut():
    with two_hosts() as (lab, a, b):
        lab.edge("b").set(delay_ms=SILENCE_S * 500)
        send(lab, a, b)
        until(lambda: lab.edge("a").counts()["up"]["passed"] == 1, within_s=ARRIVAL_S)
        lab.cut("b")
        assert b.receive("s", SILENCE_S) is None


@pytest.mark.slow
@needs_lab
def test_one_direction_can_be_cut_alone():
    with two_hosts() as (lab, a, b):
        lab.cut("a", direction="up")
        send(lab, a, b, "lost")
        send(lab, b, a, "heard")
        assert a.receive("s", ARRIVAL_S)[0] == "heard"
        assert b.receive("s", 0.0) is None


@pytest.mark.slow
@needs_lab
def test_two_sites_can_be_parted_while_both_hear_a_third():
    with NatLab(sites_from({"a": "open", "b": "open", "c": "open"})) as lab:
        hands = {name: Hand(lab.node(name)) for name in lab.hosts}
        for hand in hands.values():
            hand.bind("s", 7000)
        lab.cut("a", "b")
        for one, other in ("ab", "ba", "ac", "bc"):
            send(lab, hands[one], hands[other], one)
        assert {hands["c"].receive("s", ARRIVAL_S)[0] for _ in range(2)} == {"a", "b"}
        assert hands["a"].receive("s", 0.0) is None and hands["b"].receive("s", 0.0) is None
        lab.heal("b", "a")
        send(lab, hands["a"], hands["b"], "again")
        assert hands["b"].receive("s", ARRIVAL_S)[0] == "again"


@pytest.mark.slow
@needs_lab
def test_a_change_can_be_ordered_for_a_later_moment():
    with two_hosts() as (lab, a, b):
        lab.cut("a")
        lab.heal("a", after_s=0.2)
        began = time.monotonic()
        until(lambda: send(lab, a, b) or b.receive("s", 0.0) is not None, within_s=ARRIVAL_S)
        assert time.monotonic() - began >= 0.15


@pytest.mark.slow
@needs_lab
def test_a_lossy_cable_loses_and_counts_what_it_loses():
    with two_hosts(seed=7) as (lab, a, b):
        lab.edge("a").set(loss=0.5, direction="up")
        for number in range(100):
            send(lab, a, b, str(number))
        until(lambda: sum(lab.edge("a").counts()["up"][what] for what in ("passed", "lost")) == 100, within_s=5)
        lost = lab.edge("a").counts()["up"]["lost"]
        received = 0
        while b.receive("s", SILENCE_S if received < 100 - lost else 0.0):
            received += 1
        assert 25 < lost < 75
        assert received == 100 - lost


@pytest.mark.slow
@needs_lab
@pytest.mark.parametrize("neighbours", ["routed", "isolated"])
def test_two_stages_behind_one_address_are_seen_under_it_and_meet_only_where_they_may(neighbours):
    site = Site(hosts=("x", "y"), nat="nat-preserving", mapped=frozenset("xy"), neighbours=neighbours)
    with NatLab([site, Site(hosts=("out",))]) as lab:
        x, y, out = (Hand(lab.node(name)) for name in ("x", "y", "out"))
        assert lab.host("x").public == lab.host("y").public
        assert lab.host("x").mapped_tcp != lab.host("y").mapped_tcp
        y.listen("l", 7070)
        x.connect("within", (lab.host("y").own, 7070), "hello")
        x.connect("hairpin", (lab.host("y").public, lab.host("y").mapped_tcp), "hello")
        out.connect("outside", (lab.host("y").public, lab.host("y").mapped_tcp), "hello")
        assert out.outcome("outside", ARRIVAL_S) == "connected"
        assert x.outcome("within", SILENCE_S) == ("connected" if neighbours == "routed" else "silent")
        assert x.outcome("hairpin", 0.0) == "silent"


@pytest.mark.slow
@needs_lab
def test_blocked_udp_leaves_tcp_alone_and_can_begin_and_end_under_way():
    with two_hosts() as (lab, a, b):
        a.listen("l", 7070)
        lab.rebuild("a", udp="blocked")
        send(lab, a, b)
        send(lab, b, a)
        b.connect("c", (lab.host("a").public, 7070), "hello")
        assert b.outcome("c", ARRIVAL_S) == "connected"
        assert a.receive("s", SILENCE_S) is None and b.receive("s", 0.0) is None
        lab.rebuild("a", udp="passes")
        send(lab, a, b)
        assert b.receive("s", ARRIVAL_S)


@pytest.mark.slow
@needs_lab
def test_a_router_that_restarts_gives_a_random_port_anew():
    with NatLab(sites_from({"inside": "nat-fully-random", "out": "open"})) as lab:
        inside, out = Hand(lab.node("inside")), Hand(lab.node("out"))
        for hand in (inside, out):
            hand.bind("s", 7000)

        def seen() -> int:
            send(lab, inside, out)
            return out.receive("s", ARRIVAL_S)[2]

        first = seen()
        assert seen() == first
        lab.forget_connections("inside")
        assert seen() != first


@pytest.mark.slow
@needs_lab
def test_a_host_can_move_behind_another_kind_of_router():
    with NatLab(sites_from({"inside": "open", "out": "open"})) as lab:
        inside, out = Hand(lab.node("inside")), Hand(lab.node("out"))
        out.bind("s", 7000)
        for nat in ("nat-preserving", "nat-shifting", "open"):
            lab.rebuild("inside", nat=nat)
            inside.bind("s", 7000)
            send(lab, inside, out, nat)
            text, host, port = out.receive("s", ARRIVAL_S)
            assert (text, host) == (nat, lab.host("inside").public)
            assert (port == 7000) == (nat != "nat-shifting")


@pytest.mark.slow
@needs_lab
def test_every_named_cell_can_be_built():
    for cell, _ in list(NAMED.values())[8:12]:
        with NatLab(sites_of(cell)) as lab:
            assert set(lab.hosts) == {"home", "stage-0", "stage-1"}


# --- processes


@needs_lab
def test_a_process_gets_signals_and_tells_how_it_ended():
    with NatLab([Site(hosts=("a",))]) as lab:
        process = lab.node("a").popen(["cat"], stdin=PIPE)
        process.stdin.write(b"hello\n")
        assert process.stdout.readline() == b"hello\n"
        process.send_signal(signal.SIGSTOP)
        until(lambda: "T" in stat_of(process.pid), within_s=5)
        assert process.poll() is None
        process.kill()
        assert process.wait(5) == -signal.SIGKILL
        process.kill()  # of what has ended: nothing, to nobody else
        sulking = lab.node("a").popen(["sh", "-c", "exit 3"])
        assert sulking.wait(5) == 3


def stat_of(pid: int) -> str:
    return subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout


@needs_lab
def test_what_the_lab_cannot_do_it_says():
    with NatLab([Site(hosts=("a",))]) as lab:
        with pytest.raises(LabError, match="no-such-program"):
            lab.node("a").popen(["no-such-program"])
        with pytest.raises(ValueError, match="'b' is none of a"):
            lab.node("b")
        with pytest.raises(ValueError, match="loss cannot be 2"):
            lab.edge("a").set(loss=2)
        assert lab.node("a").popen(["true"]).wait(5) == 0  # and lives on


@pytest.mark.slow
@needs_lab
def test_the_end_of_the_lab_ends_what_its_processes_had_started():
    with NatLab([Site(hosts=("a",))]) as lab:
        process = lab.node("a").popen(["sh", "-c", "sleep 987 & echo; wait"])
        process.stdout.readline()
        pids = [process.pid, *children_of(process.pid)]
        assert len(pids) == 2
    until(lambda: not any(map(is_alive, pids)), within_s=5)


def children_of(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(line) for line in listed.split()]


# --- cleaning up

LAB_TO_BE_KILLED = """
import json, time
from tests.lab.nat_lab.lab import NatLab
from tests.lab.nat_lab.spec import sites_from
with NatLab(sites_from({"a": "nat-preserving", "b": "open"})) as lab:
    pids = [lab.node(name).popen(["sleep", "987"]).pid for name in lab.hosts]
    print(json.dumps([*pids, lab._warden.pid]), flush=True)
    time.sleep(987)
"""


def traces() -> dict[str, str]:
    """What of a lab could be seen on the machine itself."""

    def said(*args: str) -> str:
        return subprocess.run(args, capture_output=True, text=True).stdout

    return {
        "links": said("ip", "-o", "link"),
        "rules": said("nft", "list", "ruleset"),
        "namespaces": said("ip", "netns", "list") + str(os.path.exists(NETNS)),
        "mounts": "\n".join(line.split()[1] for line in open("/proc/mounts")),
        "forwarding": open("/proc/sys/net/ipv4/ip_forward").read(),
    }


def descendants_of(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        found += children_of(one)
    return found


@needs_lab
def test_a_lab_whose_process_is_killed_leaves_nothing():
    before = traces()
    process = subprocess.Popen([sys.executable, "-c", LAB_TO_BE_KILLED], cwd=ROOT, stdout=subprocess.PIPE)
    *node_pids, warden = json.loads(process.stdout.readline())
    everything = descendants_of(warden)
    assert set(node_pids) < set(everything) and len(everything) >= 5  # unshare, warden, switch, two nodes
    assert traces() == before  # not even while it runs
    process.kill()
    process.wait()
    process.stdout.close()
    until(lambda: not any(map(is_alive, everything)), within_s=5)
    assert traces() == before


@pytest.mark.slow
@needs_lab
def test_a_lab_that_ends_by_itself_leaves_nothing():
    before = traces()
    with NatLab(sites_from({"a": "nat-random", "b": "open"})) as lab:
        everything = descendants_of(lab._warden.pid)
    assert not any(map(is_alive, everything))
    assert traces() == before


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [
        ({"geteuid": lambda: 1000}, "needs root"),
        ({"which": lambda tool: None if tool == "nft" else tool}, "apt-get install nftables"),
        ({"platform": "darwin"}, "needs Linux"),
    ],
)
def test_where_the_lab_cannot_run_it_says_why(monkeypatch, lacking, reason):
    places = {"geteuid": lab_module.os, "which": lab_module.shutil, "platform": lab_module.sys}
    if "geteuid" not in lacking:
        lacking = {"geteuid": lambda: 0} | lacking
    for name, value in lacking.items():
        monkeypatch.setattr(places[name], name, value)
    assert reason in why_not.__wrapped__()


@needs_lab
def test_where_namespaces_are_forbidden_it_says_what_the_machine_answered(monkeypatch):
    monkeypatch.setattr(lab_module, "PRIVATE", ("sh", "-c", "echo unshare: Operation not permitted >&2; exit 1"))
    assert "unshare: Operation not permitted" in why_not.__wrapped__()
