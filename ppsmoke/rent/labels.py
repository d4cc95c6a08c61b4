"""The label on everything we rent: whose run, which stage, which attempt, until when. Pure text."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

PREFIX = "ppsmoke-"
MAX_LABEL_CHARS = 60  # dstack's cap; the API takes 256
EXPIRY_GRACE_S = 300  # design, Renting: a label counts as expired 5 minutes after its own time
_FORM = re.compile(r"ppsmoke-([0-9a-z]{4,20})-([0-9]{1,3})-([0-9a-f]{8})-([0-9]{9,11})")


@dataclass(frozen=True)
class Label:
    """`ppsmoke-<run>-<stage>-<nonce>-<expiry epoch>`; a fresh nonce per create call makes it unique on the account."""

    run_id: str
    stage: int
    nonce: str
    expires_at: int  # seconds since 1970; what the machine's own dead-man keeps too

    @classmethod
    def fresh(cls, run_id: str, stage: int, *, expires_at: float) -> Label:
        """A label nobody has used. Raises ValueError for a run id or a stage that would not read back."""
        label = cls(run_id, stage, secrets.token_hex(4), int(expires_at))
        if cls.parse(str(label)) != label:
            raise ValueError(f"no label can be made of run {run_id!r}, stage {stage}, expiry {expires_at}")
        return label

    @classmethod
    def parse(cls, text: str | None) -> Label | None:
        """The label in `text`, None if it is of any other form (then it is not ours to touch)."""
        match = _FORM.fullmatch(text or "")
        if match is None:
            return None
        run_id, stage, nonce, expiry = match.groups()
        return cls(run_id, int(stage), nonce, int(expiry))

    def expired(self, now: float) -> bool:
        """Is it past its time by more than the grace? `now` in seconds since 1970."""
        return now > self.expires_at + EXPIRY_GRACE_S

    def __str__(self) -> str:
        return f"{PREFIX}{self.run_id}-{self.stage}-{self.nonce}-{self.expires_at}"


def has_prefix(text: str | None) -> bool:
    """Does a label start like ours? Only then is it worth a line in a list; `ppsmoke2-...` does not."""
    return (text or "").startswith(PREFIX)
