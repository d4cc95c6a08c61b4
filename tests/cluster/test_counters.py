"""What is told of refusals; and that the table of attacks is complete and true."""

from __future__ import annotations

import ast
import logging
from collections import Counter
from pathlib import Path

import pytest

from ppsmoke.cluster.counters import ALARM_AT, EVERYDAY, REFUSALS, SERIOUS, Watch
from tests.lab.attacks import ATTACKS, Attack

ROOT = Path(__file__).parent.parent.parent
COUNTED_ONLY = {"link.cut"}  # honest networks do that too
ELSEWHERE = {"Inbox.refused": "ppsmoke/inbox.py", "Intake.unwelcome": "ppsmoke/pipeline/intake.py"}


def told(caplog, *counts: Counter[str]) -> list[tuple[int, str]]:
    log = logging.getLogger("ppsmoke.cluster")
    watch = Watch(log)
    with caplog.at_level(logging.INFO, logger=log.name):
        for one in counts:
            watch.tell(one)
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_nothing_is_said_of_what_is_let_in(caplog):
    assert told(caplog, Counter({"door.accepted": 5, "door.linked": 5, "datagram.opened": 900})) == []


@pytest.mark.parametrize(
    ("counts", "level"),
    [
        ({"door.wrong-preamble": ALARM_AT - 1}, logging.INFO),
        ({"door.wrong-preamble": ALARM_AT}, logging.WARNING),
        ({"handshake.wrong-node": 1}, logging.WARNING),
    ],
)
def test_a_scanner_is_a_remark_a_flood_and_a_lying_member_are_a_warning(caplog, counts, level):
    ((found, line),) = told(caplog, Counter(counts))
    assert found == level and line.startswith("refused: ")


def test_each_line_says_what_rose_since_the_last_one(caplog):
    first, second = Counter({"door.evicted": 3}), Counter({"door.evicted": 3, "relay.bad-token": 2})
    lines = [line for _, line in told(caplog, first, first, second, second)]
    assert lines == [
        "refused: 3 connections dropped because too many said nothing",
        "refused: 2 relay legs with a token that is not, or no longer, good",
    ]


def test_a_line_names_the_most_and_counts_the_rest(caplog):
    ((_, line),) = told(caplog, Counter(dict.fromkeys(SERIOUS, 1)) + Counter({"datagram.wrong-tag": 20_000}))
    assert line.startswith("refused: 20,000 datagrams without this cluster's key; 1 ")
    assert line.endswith(f"; {len(SERIOUS) + 1 - 6} more kinds")


def test_no_refusal_is_both_everyday_and_serious():
    assert not EVERYDAY.keys() & SERIOUS.keys()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: f"{attack.what}, {attack.counter}")
def test_the_table_of_attacks_names_tests_that_exist_and_counters_of_the_product(attack: Attack):
    path, _, name = attack.test.partition("::")
    source = (ROOT / path).read_text()
    assert name in {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    assert attack.control
    if attack.counter in ELSEWHERE:
        assert f"self.{attack.counter.partition('.')[2]} += 1" in (ROOT / ELSEWHERE[attack.counter]).read_text()
    elif attack.counter != "Outcome.refused":
        assert attack.counter in REFUSALS.keys() | COUNTED_ONLY
        assert f'"{attack.counter}"' in source, "the test looks at it"
