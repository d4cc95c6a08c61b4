"""The expected table against the rules it was derived from, and its own shape."""

from dataclasses import replace

import pytest

from tests.lab.nat_lab.expected import (
    HOME_TYPES,
    IN_CI,
    NAMED,
    NODES,
    PAIRS,
    STAGE_0,
    STAGE_1,
    STAGE_TYPES,
    TABLE,
    Cell,
    expected,
    whole_table,
)


def written_out() -> list[tuple[Cell, str]]:
    return [
        (Cell(home=home, stage_0=stage_0, stage_1=stage_1), word)
        for home in HOME_TYPES
        for stage_0, row in zip(STAGE_TYPES, TABLE[home], strict=True)
        for stage_1, word in zip(STAGE_TYPES, row.split(), strict=True)
    ]


def test_the_rules_give_every_cell_of_the_table_written_out_by_hand():
    assert {str(cell): expected(cell).word for cell, _ in written_out()} == {
        str(cell): word for cell, word in written_out()
    }


@pytest.mark.parametrize(("cell", "word"), NAMED.values(), ids=list(NAMED))
def test_the_rules_give_every_named_cell(cell, word):
    assert expected(cell).word == word


def test_the_whole_table_is_five_by_five_by_three_without_and_with_mapped_ports():
    assert len(set(whole_table())) == 150
    assert len(IN_CI) == 12


def test_with_mapped_ports_on_both_stages_every_pair_is_direct():
    both = frozenset((STAGE_0, STAGE_1))
    assert {expected(replace(cell, mapped=both)).word for cell, _ in written_out()} == {"DDD"}


def test_a_mapped_port_makes_a_stage_as_good_as_open():
    for cell, _ in written_out():
        mapped = replace(cell, mapped=frozenset({STAGE_0}))
        assert expected(mapped).word == expected(replace(cell, stage_0="open")).word


def test_a_cell_that_cannot_work_is_mended_by_whichever_node_becomes_dialable():
    for cell, word in written_out():
        if "x" in word:
            assert expected(cell).must_change == NODES
            for node in NODES:
                assert expected(replace(cell, mapped=frozenset({node}))).works


def test_the_table_does_not_depend_on_which_stage_is_called_the_first():
    for cell, _ in written_out():
        swapped = expected(replace(cell, stage_0=cell.stage_1, stage_1=cell.stage_0))
        assert [swapped.paths[pair] for pair in (PAIRS[1], PAIRS[0], PAIRS[2])] == list(expected(cell).paths.values())
