"""Whole clusters in virtual time: what must hold in any weather, by seeds. The slow ones are the same with more."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from ppsmoke.cluster.swim_state import Config, EpochRaised, MemberChanged, State, UdpBlocked
from tests.lab.swim_page import Mean, rows, table, verdict
from tests.lab.virtual_net import VirtualNet, Weather

ROOT = Path(__file__).parents[2]
QUICK, MORE = range(2), range(2, 60)
ROUGH = Weather(loss=0.2, spike=0.05, duplicate=0.05, jitter=0.5)
BAD_UDP = Weather(loss=0.4)


def seeds(test):
    """A few now, many in the slow run."""
    slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in MORE]
    return pytest.mark.parametrize("seed", [*QUICK, *slow])(test)


def healed(net: VirtualNet, *, within_s: float) -> bool:
    net.run(until_s=net.now_s + within_s, stop=net.agree_all_live)
    return net.agree_all_live()


def buried_alive(net: VirtualNet) -> list[str]:
    return [change.subject for change in net.changes_to(State.DEAD) if change.really_up]


def resolves_everywhere(net: VirtualNet, name: str) -> bool:
    return all(node.core.lookup(name) for node in net.running())


@pytest.mark.parametrize("sealed", [False, True])
def test_the_same_seed_gives_the_same_bytes(sealed):
    def log(seed: int) -> str:
        net = VirtualNet(nodes=5, seed=seed, weather=ROUGH, sealed=sealed)
        net.freeze("node-1", from_s=8, to_s=16).cut("node-2", "node-3", from_s=10, to_s=20).crash("node-4", at_s=12)
        return net.restart("node-4", at_s=20).run(until_s=30).log_hash.hexdigest()

    assert log(1) == log(1) != log(2)


def test_a_run_is_the_same_on_every_python():
    net = VirtualNet(nodes=4, seed=7, weather=ROUGH, sealed=True).crash("node-3", at_s=8).run(until_s=20)
    assert net.log_hash.hexdigest()[:16] == "56d77305cdfe3742"


@seeds
def test_the_living_agree_on_the_dead_whatever_is_lost(seed):
    net = VirtualNet(nodes=5, seed=seed, weather=BAD_UDP, links=False).crash("node-3", at_s=20).run(until_s=20)
    net.run(until_s=120, stop=lambda: net.views_of("node-3") == {State.DEAD})
    assert net.views_of("node-3") == {State.DEAD}


@seeds
@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
def test_nobody_is_buried_or_even_suspected_in_ordinary_weather(nodes, seed):
    net = VirtualNet(nodes=nodes, seed=seed, weather=Weather(loss=0.03)).run(until_s=60)
    assert net.agree_all_live() and not net.changes_to(State.SUSPECT) and not net.changes_to(State.DEAD)


@seeds
@pytest.mark.parametrize("clock_back_s", [0.0, 3600.0])
def test_a_restart_wins_at_once_even_with_a_clock_that_went_back(clock_back_s, seed):
    net = VirtualNet(nodes=4, seed=seed).crash("node-2", at_s=20).restart("node-2", at_s=24, clock_back_s=clock_back_s)
    net.run(until_s=24)
    assert healed(net, within_s=4), "in a new life, though nobody had found the old one dead"
    raised = [e for _, e in net.nodes["node-2"].events if isinstance(e, EpochRaised)]
    assert bool(raised) is (clock_back_s > 0)


@seeds
def test_a_restart_after_the_funeral_wins_at_once(seed):
    net = VirtualNet(nodes=4, seed=seed).crash("node-2", at_s=20).restart("node-2", at_s=60).run(until_s=60)
    assert net.views_of("node-2") == {State.DEAD}
    assert healed(net, within_s=3)


@seeds
def test_a_cluster_in_which_everybody_has_buried_everybody_heals(seed):
    net = VirtualNet(nodes=4, seed=seed, links=False)
    for a in range(4):
        for b in range(a):
            net.cut(f"node-{a}", f"node-{b}", from_s=20, to_s=100)
    net.run(until_s=100)
    assert {view for name in net.nodes for view in net.views_of(name)} == {State.DEAD}
    assert healed(net, within_s=20)


@seeds
def test_a_name_survives_the_false_death_of_its_owner(seed):
    net = VirtualNet(nodes=3, seed=seed).run(until_s=10)
    net.do("node-1", lambda core, now: core.register(now, "pp-entry", b"stage"))
    net.isolate("node-1", from_s=20, to_s=90).run(until_s=90)
    others = [net.nodes["node-0"].core, net.nodes["node-2"].core]
    assert net.views_of("node-1") == {State.DEAD} and not any(core.lookup("pp-entry") for core in others)
    net.run(until_s=120, stop=lambda: resolves_everywhere(net, "pp-entry"))
    assert resolves_everywhere(net, "pp-entry"), "and its owner has not registered it again"
    assert {core.lookup("pp-entry")[0].version for core in others} == {1}


@seeds
def test_with_udp_blocked_everywhere_membership_goes_on_over_the_links(seed):
    net = VirtualNet(nodes=3, seed=seed)
    for a, b in (("node-0", "node-1"), ("node-0", "node-2"), ("node-1", "node-2")):
        net.cut(a, b, from_s=20, to_s=80, udp_only=True)
    net.run(until_s=80)
    assert not net.changes_to(State.SUSPECT)
    warned = [e.node_id for e in (e for node in net.running() for _, e in node.events) if isinstance(e, UdpBlocked)]
    assert len(warned) == 6, "each node warns of each peer once"
    net.crash("node-2", at_s=81).run(until_s=100)
    assert net.views_of("node-2") == {State.DEAD}


@seeds
def test_a_path_that_is_cut_one_way_is_made_up_for_by_the_others(seed):
    net = VirtualNet(nodes=4, seed=seed, links=False).cut("node-1", "node-2", from_s=10, to_s=200, one_way=True)
    assert buried_alive(net.run(until_s=100)) == []


@seeds
def test_whoever_was_frozen_buries_nobody_and_is_back_at_once(seed):
    net = VirtualNet(nodes=4, seed=seed).freeze("node-1", from_s=20.3, to_s=80.7).run(until_s=80.6)
    assert net.views_of("node-1") == {State.DEAD}
    assert healed(net, within_s=3)
    net.run(until_s=120)
    assert [c for c in net.changes_to(State.DEAD) if c.observer == "node-1"] == []
    assert [c for c in net.changes_to(State.SUSPECT, after_s=85)] == []


@seeds
def test_freezes_shorter_than_the_suspicion_cost_nobody_its_place(seed):
    net = VirtualNet(nodes=4, seed=seed)
    for number, name in enumerate(net.nodes):
        net.freeze(name, from_s=20 + 7 * number, to_s=29 + 7 * number)
    assert buried_alive(net.run(until_s=80)) == [] and net.agree_all_live()


@seeds
def test_after_one_freeze_a_longer_one_of_somebody_else_buries_nobody(seed):
    net = VirtualNet(nodes=4, seed=seed).freeze("node-2", from_s=12, to_s=18).freeze("node-1", from_s=20, to_s=31.9)
    assert buried_alive(net.run(until_s=33)) == [] and net.agree_all_live()


@seeds
def test_who_leaves_is_gone_everywhere_at_once_and_never_suspected(seed):
    net = VirtualNet(nodes=4, seed=seed).run(until_s=10)
    net.do("node-3", lambda core, now: core.leave(now))
    net.run(until_s=12).crash("node-3", at_s=12).run(until_s=60)
    assert net.views_of("node-3") == {State.LEFT}
    assert [change for change in net.changes if change.new in (State.SUSPECT, State.DEAD)] == []


@pytest.mark.slow
@seeds
def test_whatever_happened_once_it_is_over_all_agree(seed):
    generator = random.Random(seed)
    net = VirtualNet(nodes=5, seed=seed, weather=ROUGH, sealed=seed % 2 == 0)
    names = list(net.nodes)
    for _ in range(6):
        begin = 10 + generator.random() * 60
        end = begin + generator.random() * 40
        a, b = generator.sample(names, 2)
        match generator.randrange(4):
            case 0:
                net.freeze(a, from_s=begin, to_s=end)
            case 1:
                net.cut(a, b, from_s=begin, to_s=end, one_way=generator.random() < 0.5)
            case 2:
                net.isolate(a, from_s=begin, to_s=end)
            case _:
                net.crash(a, at_s=begin).restart(a, at_s=end, clock_back_s=generator.choice((0, 100)))
    net.run(until_s=115)
    net.do("node-4", lambda core, now: core.register(now, "pp-exit", b"x"))
    assert healed(net, within_s=30)
    net.run(until_s=net.now_s + 20, stop=lambda: resolves_everywhere(net, "pp-exit"))
    assert resolves_everywhere(net, "pp-exit")
    for node in net.running():
        monotone(node.events)


def monotone(events: list[tuple[int, object]]) -> None:
    """Evidence about a member never goes back."""
    latest: dict[str, tuple[int, int]] = {}
    for _, event in events:
        if isinstance(event, MemberChanged):
            order = event.epoch, event.incarnation
            assert order >= latest.get(event.node_id, order)
            latest[event.node_id] = order


@pytest.mark.parametrize(("nodes", "limit"), [(3, 2.05), (4, 2.05), (12, 2.05)])
def test_an_idle_node_sends_two_packets_a_second_and_little_more(nodes, limit):
    net = VirtualNet(nodes=nodes, seed=1, weather=Weather(loss=0, spike=0)).run(until_s=20)
    before = net.packets
    net.run(until_s=60)
    assert 1.95 < (net.packets - before) / 40 / nodes < limit


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_twenty_nodes_find_a_crash_within_seventeen_seconds(seed):
    net = VirtualNet(nodes=20, seed=seed).crash("node-19", at_s=40).run(until_s=57)
    assert net.views_of("node-19") == {State.DEAD} and buried_alive(net) == []


def test_without_udp_a_cluster_lives_on_its_links():
    net = VirtualNet(nodes=3, seed=1, config=Config(udp=False)).run(until_s=40)
    assert net.agree_all_live() and not net.changes_to(State.SUSPECT)
    assert not [e for node in net.running() for _, e in node.events if isinstance(e, UdpBlocked)]


def test_the_table_of_figures_calls_worse_what_is_worse():
    assert verdict("relay: suspected", 4, Mean(0.05, 0.1, 1)) == "0"
    assert verdict("relay: suspected", 4, Mean(0.06, 0.1, 1)) == "0, WORSE"
    assert verdict("crash: first", 4, Mean(11.8, 0.1, 13)) == "11.9"
    assert verdict("crash: first", 4, Mean(12.1, 0.1, 13)) == "11.9, WORSE"
    assert verdict("crash: first", 7, Mean(12.1, 0.1, 13)) == ""


def test_the_table_of_figures_counts_a_seed_once_and_names_what_is_worse():
    runs = [(4, 1, {"crash: first": 11.0}), (4, 0, {"crash: first": 13.2}), (4, 1, {"crash: first": 11.0})]
    (row,) = rows(runs)
    assert (row.seeds, row.mean.value, row.mean.worst) == (2, 12.1, 13.2)
    *_, sum_of_it = table([row])
    assert (row.verdict, sum_of_it) == ("11.9, equal", "1 of 1 figures have a value on the page; 0 are worse")
    *_, worse = table(rows([(4, seed, {"crash: first": 12.1}) for seed in range(2)]))
    assert worse == "  worse: crash: first, n = 4: 12.10, not 11.9, WORSE"


@pytest.mark.slow
def test_a_measurement_that_is_split_and_continued_gives_the_same_table_as_one_at_once(tmp_path):
    def figures(*arguments: str) -> str:
        command = [sys.executable, "-m", "tests.lab.swim_figures", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout

    chosen = ("--only", "name", "--sizes", "3")
    whole = figures(*chosen, "--seeds", "3")
    one, other = str(tmp_path / "one.jsonl"), str(tmp_path / "other.jsonl")
    figures(*chosen, "--seeds", "1", "--json", one)
    assert "2 of 2 runs" in figures(*chosen, "--seeds", "2", "--jobs", "2", "--json", one)
    assert "0 of 1 runs" in figures(*chosen, "--first", "2", "--seeds", "1", "--stop-after-s", "0", "--json", other)
    figures(*chosen, "--first", "2", "--seeds", "1", "--json", other)
    assert len((tmp_path / "one.jsonl").read_text().splitlines()) == 2, "what was there has not been measured again"
    of_both = figures("--merge", other, one)
    assert of_both.splitlines()[:2] == whole.splitlines()[:2] and "name known everywhere" in of_both
