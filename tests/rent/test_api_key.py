"""Where the key comes from, and that it shows nowhere."""

from __future__ import annotations

import pickle

import pytest

from ppsmoke.errors import UsageError
from ppsmoke.rent.api_key import ApiKey, child_environment, find_key

SECRET = "0123456789abcdef" * 4


def look(tmp_path, argument=None, stdin="", **environ):
    key, source = find_key(argument, environ=environ, home=tmp_path, read_stdin=lambda: stdin)
    return key.reveal(), source


def test_the_first_source_that_exists_gives_the_key(tmp_path):
    legacy, current = tmp_path / ".vast_api_key", tmp_path / ".config" / "vastai" / "vast_api_key"
    legacy.write_text("legacy\n")
    assert look(tmp_path) == ("legacy", str(legacy))
    current.parent.mkdir(parents=True)
    current.write_text("current\n")
    assert look(tmp_path) == ("current", str(current))
    other = tmp_path / "xdg" / "vastai" / "vast_api_key"
    other.parent.mkdir(parents=True)
    other.write_text("xdg")
    assert look(tmp_path, XDG_CONFIG_HOME=str(tmp_path / "xdg")) == ("xdg", str(other))
    assert look(tmp_path, VAST_API_KEY="env") == ("env", "VAST_API_KEY")
    assert look(tmp_path, VAST_API_KEY=" ") == ("current", str(current))
    assert look(tmp_path, "arg", VAST_API_KEY="env") == ("arg", "--api-key")
    assert look(tmp_path, "-", "typed\n", VAST_API_KEY="env") == ("typed", "stdin")


@pytest.mark.parametrize("bad", ["", "   ", "two words", "line\nbreak", "naïve", "x" * 2000, "\x00"])
def test_what_can_be_no_key_is_refused_without_being_shown(bad):
    with pytest.raises(UsageError) as caught:
        ApiKey(bad)
    assert not bad.strip() or bad not in str(caught.value)


def test_no_key_at_all_says_where_one_may_stand(tmp_path):
    with pytest.raises(UsageError) as caught:
        look(tmp_path)
    assert "--api-key" in caught.value.hint and "VAST_API_KEY" in caught.value.hint


def test_an_unusable_key_file_is_named_not_passed_over(tmp_path):
    (tmp_path / ".vast_api_key").write_text("two words")
    with pytest.raises(UsageError, match="vast_api_key"):
        look(tmp_path)


def test_a_key_prints_as_dots():
    key = ApiKey(SECRET)
    assert SECRET not in f"{key} {key!r} {[key]} {key.fingerprint()}"
    assert key.redact(f"Bearer {SECRET}!".encode()) == b"Bearer [key]!"
    assert ApiKey("K").redact(b"a lab's key: K") == b"a lab's key: K"
    with pytest.raises(TypeError):
        pickle.dumps(key)


def test_children_get_everything_but_the_key():
    assert child_environment({"PATH": "/bin", "VAST_API_KEY": SECRET}) == {"PATH": "/bin"}
