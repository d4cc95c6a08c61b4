"""The registry's rules: who may write, which entry counts, and how much of it there can be."""

from __future__ import annotations

import itertools

import pytest

from ppsmoke.cluster.names import (
    MAX_ENTRIES,
    MAX_NAMES_PER_OWNER,
    MAX_OWNERS_PER_NAME,
    MAX_VALUE_BYTES,
    NameEntry,
    NameRegistry,
)

OLD = NameEntry("pp-entry", "aa", owner_epoch=5, version=1, generation=0, value=b"old")


def everybody(owner: str, epoch: int) -> bool:
    return True


@pytest.mark.parametrize(
    ("change", "newer"),
    [
        ({}, False),
        ({"version": 2}, True),
        ({"owner_epoch": 6, "version": 1}, True),
        ({"owner_epoch": 4, "version": 9}, False),
        ({"version": 2, "deleted": True}, True),
        ({"version": 1, "value": b"forged"}, False),
        ({"generation": 9}, False),  # an owner that changes its generation writes a new version
    ],
)
def test_an_owners_later_entry_replaces_its_earlier_one_and_nothing_else_does(change, newer):
    registry = NameRegistry()
    assert registry.hear(OLD)
    later = OLD._replace(**change)
    assert registry.hear(later) is newer
    assert registry.get("pp-entry", "aa") == (later if newer else OLD)


def test_the_order_of_hearing_does_not_matter():
    entries = [OLD, OLD._replace(version=2, value=b"2"), OLD._replace(owner_epoch=6), OLD._replace(owner="bb")]
    results = set()
    for order in itertools.permutations(entries):
        registry = NameRegistry()
        for entry in order:
            registry.hear(entry)
        results.add(tuple(registry))
    assert len(results) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (OLD._replace(owner="bb", generation=1), OLD._replace(owner_epoch=9)),  # a replacement stage
        (OLD._replace(owner="bb", owner_epoch=6), OLD._replace(version=9)),  # then the later life
        (OLD._replace(owner="bb"), OLD),  # then the higher id, so that all agree
    ],
)
def test_of_several_owners_the_best_comes_first(first, second):
    registry = NameRegistry()
    registry.hear(second)
    registry.hear(first)
    assert registry.lookup("pp-entry", lives=everybody) == [first, second]
    assert registry.rivals(second) == [first] and registry.rivals(first) == []


def test_only_owners_that_live_in_the_life_that_registered_are_found():
    registry = NameRegistry()
    registry.hear(OLD)
    registry.hear(OLD._replace(owner="bb", generation=3))
    assert [e.owner for e in registry.lookup("pp-entry", lives=lambda owner, epoch: owner == "aa")] == ["aa"]
    assert registry.lookup("pp-entry", lives=lambda owner, epoch: epoch == 6) == []
    assert registry.lookup("pp-exit", lives=everybody) == []


def test_a_deleted_name_is_not_found_but_remembered_until_the_owner_is_forgotten():
    registry = NameRegistry()
    registry.write("n", owner="aa", epoch=5, value=b"v", generation=0, deleted=False)
    gone = registry.write("n", owner="aa", epoch=5, value=b"", generation=0, deleted=True)
    assert gone.version == 2 and registry.lookup("n", lives=everybody) == []
    assert not registry.hear(OLD._replace(name="n")), "an older copy must not bring it back"
    registry.forget("aa")
    assert len(registry) == 0


def test_a_new_life_writes_from_version_one_above_the_old_life():
    registry = NameRegistry()
    registry.hear(OLD._replace(version=40))
    entry = registry.write("pp-entry", owner="aa", epoch=6, value=b"new", generation=0, deleted=False)
    assert (entry.version, registry.get("pp-entry", "aa")) == (1, entry)


@pytest.mark.parametrize(("name", "value"), [("", b""), ("n" * 65, b""), ("é" * 33, b""), ("n", bytes(129))])
def test_what_does_not_fit_is_refused_before_it_is_told(name, value):
    with pytest.raises(ValueError):
        NameRegistry().write(name, owner="aa", epoch=1, value=value, generation=0, deleted=False)


def test_a_liar_cannot_fill_the_memory():
    registry = NameRegistry()
    for owner in range(40):
        for number in range(100):
            registry.hear(OLD._replace(name=f"n{number}", owner=f"{owner:02x}", value=bytes(MAX_VALUE_BYTES)))
    assert len(registry) == MAX_ENTRIES and registry.refused == 4_000 - MAX_ENTRIES
    assert len(registry.of("00")) == MAX_NAMES_PER_OWNER
    assert registry.hear(OLD._replace(name="n0", owner="00", version=2)), "known names may still change"
    registry.forget("00")
    assert registry.hear(OLD._replace(name="new", owner="ff")), "and whoever is forgotten makes room"


def test_one_name_has_a_bounded_number_of_owners():
    registry = NameRegistry()
    assert sum(registry.hear(OLD._replace(owner=f"{owner:04x}")) for owner in range(100)) == MAX_OWNERS_PER_NAME
