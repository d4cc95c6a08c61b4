"""What a --model may be, and what it is refused as."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppsmoke import models
from ppsmoke.errors import InputError
from ppsmoke.models import MODELS, Url, Wheel, describe, find, fingerprint, resolve


def test_the_catalogue_is_complete():
    assert {"smollm2:135m", "llama3.2:1b", "llama3.2:3b", "llama3.1:8b"} <= set(MODELS)
    for name, model in MODELS.items():
        assert model.name == name and model.blocks > 1 and model.bytes > 1 << 20 and model.context >= 2048
        assert model.sha256 is None or len(bytes.fromhex(model.sha256)) == 32
        if isinstance(model.source, Url):
            assert models.resolve(model.source.url) == model.source
            assert "/resolve/main/" not in model.source.url  # a branch moves, a revision does not
        else:
            assert isinstance(model.source, Wheel) and "==" in model.source.requirement


def test_a_reference_is_a_name_a_path_or_a_url(tmp_path, monkeypatch):
    path = tmp_path / "some.gguf"
    path.touch()
    monkeypatch.chdir(tmp_path)
    assert resolve("smollm2:135m") is MODELS["smollm2:135m"] is find("smollm2:135m")
    assert resolve(str(path)) == path
    assert resolve("some.gguf") == Path("some.gguf")
    assert resolve("https://example.org/a/model.gguf?x=1") == Url("https://example.org/a/model.gguf?x=1")
    assert resolve("http://127.0.0.1:8000/model.gguf") == Url("http://127.0.0.1:8000/model.gguf")


@pytest.mark.parametrize(
    ("reference", "cause", "hint"),
    [
        ("smolm2:135m", "'smolm2:135m' is no model that we know", "smollm2:135m"),
        ("llama3.2", "is no model that we know", "llama3.2:1b"),
        ("LLAMA3.2:1B", "is no model that we know", "llama3.2:1b"),
        ("gpt-5", "is no model that we know", "smollm2:135m"),
        ("", "is no model that we know", "smollm2:135m"),
        ("/nowhere/model.gguf", "there is no file /nowhere/model.gguf", "path"),
        ("model.gguf", "there is no file model.gguf", "path"),
        ("http://example.org/model.gguf", "begins with http://", "https"),
        ("ftp://example.org/model.gguf", "begins with ftp://", "https"),
        ("file:///etc/passwd", "names no host", ""),
        ("https:///model.gguf", "names no host", ""),
        ("https://example.org", "no file", ""),
        ("https://example.org/a b", "no URL may hold", ""),
        ("https://[::1/model.gguf", "malformed", ""),
        ("https://example.org:x/model.gguf", "malformed", ""),
        ("https://me:secret@example.org/model.gguf", "user name or password", "public"),
    ],
)
def test_anything_else_is_refused_with_what_is_near(reference, cause, hint):
    with pytest.raises(InputError) as caught:
        resolve(reference)
    assert cause in str(caught.value) and hint in caught.value.hint
    assert "secret" not in str(caught.value)


def test_equal_models_have_equal_fingerprints_and_others_do_not(tmp_path, monkeypatch):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert fingerprint("a.gguf") == fingerprint(str(path))
    references = [*MODELS, str(path), str(tmp_path / "none.gguf"), "https://example.org/a", "https://example.org/b"]
    assert len({fingerprint(reference) for reference in references}) == len(references)
    before = fingerprint(str(path))
    path.write_bytes(b"GGUF longer")
    assert fingerprint(str(path)) != before


def test_a_model_is_described_in_a_line():
    assert describe("smollm2:135m") == "smollm2:135m (98 MB, 30 blocks)"
    assert describe("https://example.org/a.gguf?signature=x") == "https://example.org/a.gguf"
    assert describe("some.gguf") == "some.gguf"
