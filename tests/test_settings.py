"""Values that cannot work are refused before anything is started, by the name of the option."""

from pathlib import Path

import pytest

from ppsmoke.errors import InputError, UsageError
from ppsmoke.settings import Settings, state_dir


@pytest.mark.parametrize(
    ("field", "value", "option"),
    [
        ("max_tokens", 0, "--max-tokens"),
        ("max_tokens", -5, "--max-tokens"),
        ("num_stages", 0, "--stages"),
        ("num_stages", 1000, "--stages"),
        ("max_context", 1, "--max-context"),
        ("budget_s", 0.0, "--budget"),
        ("budget_s", float("nan"), "--budget"),
        ("wire_dtype", "int8", "--wire-dtype"),
        ("model", "", "--model"),
        ("model", "a\0b", "--model"),
    ],
)
def test_an_impossible_value_is_a_usage_error_that_names_its_option(field, value, option):
    with pytest.raises(UsageError, match=option) as caught:
        Settings(**{field: value})
    assert caught.value.exit_status == 2


def test_a_prompt_that_is_no_text_is_refused():
    with pytest.raises(InputError, match="UTF-8"):
        Settings(prompt="caf\udce9")


def test_every_run_has_its_own_key_and_the_key_is_never_shown():
    one, two = Settings(), Settings()
    assert one.run_key != two.run_key and one.run_id != two.run_id
    assert one.run_key.hex() not in repr(one) and repr(one.run_key) not in repr(one)


@pytest.mark.parametrize(("environ", "where"), [
    ({}, "home/.local/state/ppsmoke"), ({"XDG_STATE_HOME": ""}, "home/.local/state/ppsmoke"),
    ({"XDG_STATE_HOME": "relative"}, "home/.local/state/ppsmoke"), ({"XDG_STATE_HOME": "/x"}, "/x/ppsmoke"),
])  # fmt: skip
def test_the_state_folder_is_where_xdg_says(environ, where):
    assert str(state_dir(environ, Path("home"))) == where
