"""Our side of the boot: the code and the certificates go to a container that has come up, and what pip does comes back.

The wire stands in process_one.py and second_stage.py. Nothing that is sent is secret, and nothing that is received is
believed before the stage's secret proves it; the machine's owner has that too, so every field is checked, and text is
made harmless.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from ppsmoke.errors import DeadlineExceeded, InputError, StageError, printable
from ppsmoke.rent import second_stage
from ppsmoke.rent.process_one import BODY_S, MAGIC, MAX_PAYLOAD_BYTES, proof
from ppsmoke.rent.second_stage import PUSH, WATCH
from ppsmoke.waiting import Deadline

T = TypeVar("T")
NONCE_BYTES = PROOF_BYTES = 32
CONNECT_S = 5.0
GREETING_S = 4.0  # the boot greets at once; a node, which speaks TLS, waits for the other side to begin
PROOF_S = 10.0
RECORD_S = 5 * second_stage.TICK_S
RETRY_S, MAX_RETRY_S = 0.2, 2.0
MAX_RECORD_BYTES = 64 << 10
MAX_NUMBER = 1e9  # of seconds, tries and exit statuses alike; NaN is not below it either
SILENCES = 2  # in a row: one alone may be a machine whose processors are all busy
NO_OUTPUT = "no output"
MAX_WRONG_PROOFS = 4  # in a row; one alone may be a connection that was cut at the wrong moment


class BootFailed(StageError):
    """A container that is up but cannot become a stage. kind: "pip", "proof" or "ended"."""

    def __init__(self, cause: str, *, kind: str, stage: int | None, hint: str = "", detail: str = "") -> None:
        super().__init__(cause, phase="boot", stage=stage, hint=hint, detail=detail)
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class BootStatus:
    """What a container's boot says of itself. state: accepted (the code), starting (the node, now), failed (pip), ended
    (the node)."""

    state: str
    python: str
    dead_man: str  # "armed", or why it is not
    dead_man_restarts: int
    pip_try: int
    pip_s: float  # from the start command to pip's end, 0 before it
    exit: int | None  # pip's or the node's exit status, once it has one
    tail: str  # the last output of pip or the node

    @classmethod
    def read(cls, text: bytes) -> BootStatus:
        """From a record's JSON. Raises ValueError for what is no record."""
        try:
            said = json.loads(text)
        except RecursionError as error:
            raise ValueError("a record that is nested without end") from error
        if not isinstance(said, dict):
            raise ValueError("a record that is no object")

        def field(name: str, kind: type | tuple[type, ...], default):
            value = said.get(name)
            fits = isinstance(value, kind) and not isinstance(value, bool)
            return value if fits and (isinstance(value, str) or abs(value) <= MAX_NUMBER) else default

        return cls(
            state=printable(field("state", str, ""))[:20],
            python=printable(field("python", str, ""))[:40],
            dead_man=printable(field("dead_man", str, "armed"))[:80],
            dead_man_restarts=field("dead_man_restarts", int, 0),
            pip_try=field("pip_try", int, 0),
            pip_s=float(field("pip_s", (int, float), 0.0)),
            exit=field("exit", int, None),
            tail=_words(printable(field("tail", str, ""))),
        )

    @property
    def last_line(self) -> str:
        """The last line of output that says something."""
        lines = [line.strip() for line in self.tail.splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith(("error", "fatal"))]
        return (errors or lines or [NO_OUTPUT])[-1][:300]

    @property
    def warning(self) -> str:
        """What a person should know about the dead-man, "" where all is well."""
        if self.dead_man != "armed":
            return f"the machine cannot end itself ({self.dead_man}): only this program and its reaper will"
        return f"its dead-man was ended {self.dead_man_restarts} times" if self.dead_man_restarts else ""


def _words(tail: str) -> str:
    """Output without the line in which a node tells programs where it listens."""
    return "".join(line for line in tail.splitlines(keepends=True) if not line.startswith('{"status": "listening"'))


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """A push that arrived. status is None, and confirmed False, where the boot's last word was lost but the port has
    changed hands, which only the node's start can do."""

    attempts: int
    seconds: float  # from the first attempt to the node's start
    payload_bytes: int
    sha256: str
    confirmed: bool
    status: BootStatus | None


def build_payload(certificates_json: str, code: bytes) -> bytes:
    """Certificates (public) and a zipapp as one container: 4 bytes of length, the certificates, the zipapp. code is b""
    for a baked image. Raises InputError where it is larger than a boot takes."""
    certificates = certificates_json.encode()
    payload = len(certificates).to_bytes(4, "big") + certificates + code
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise InputError(f"the code has {len(payload)} bytes, a boot takes {MAX_PAYLOAD_BYTES}", phase="boot")
    return payload


async def push(
    host: str,
    port: int,
    node_secret: bytes,
    payload: bytes,
    *,
    deadline: Deadline,
    stage: int | None = None,
    on_status: Callable[[BootStatus], None] = lambda status: None,
) -> PushReport:
    """Give a container its code and wait until it starts the node; on_status gets every record on the way.

    Tries again while the port is not up, with back-off. Raises BootFailed, or DeadlineExceeded with what was seen last.
    May be cancelled at any time, and called again with the same payload.
    """
    began = time.monotonic()
    pushing = _Push(_Boot(host, port, node_secret, deadline), payload, stage, on_status)
    attempts = await pushing.until_started(deadline)
    return PushReport(
        attempts=attempts,
        seconds=time.monotonic() - began,
        payload_bytes=len(payload),
        sha256=pushing.digest.hex(),
        confirmed=pushing.confirmed,
        status=pushing.status,
    )


async def ask_boot(host: str, port: int, node_secret: bytes, *, deadline: Deadline) -> BootStatus:
    """What a boot says of itself now: after a node's end, how it ended and its last output. One attempt; raises
    BootFailed where no boot answers (while a node runs, the port is the node's)."""
    try:
        async with _Boot(host, port, node_secret, deadline).proven(WATCH) as talk:
            return await talk.next_record()
    except _Seen as seen:
        raise BootFailed(f"{host}:{port}: {seen}", kind="proof", stage=None) from seen


class _Push:
    """One payload on its way. Connections come and go; what has been reached stays."""

    def __init__(self, boot: _Boot, payload: bytes, stage: int | None, on_status: Callable[[BootStatus], None]) -> None:
        self._boot = boot
        self._payload = payload
        self._stage = stage
        self._on_status = on_status
        self._sent = False
        self.digest = hashlib.sha256(payload).digest()
        self.status: BootStatus | None = None
        self.confirmed = False

    async def until_started(self, deadline: Deadline) -> int:
        """How many attempts it took."""
        attempts = wrong_proofs = silences = 0
        while True:
            attempts += 1
            try:
                await self._attempt()
                self.confirmed = True
                return attempts
            except _Seen as seen:
                silences = silences + 1 if seen.silent and self._sent else 0
                if silences == SILENCES:
                    return attempts  # the boot greets at once; a node there waits for us to begin
                wrong_proofs = wrong_proofs + 1 if seen.proof else 0
                if wrong_proofs == MAX_WRONG_PROOFS:
                    raise BootFailed(
                        f"{self._boot.where}: {seen}",
                        kind="proof",
                        stage=self._stage,
                        hint="is this another run's or another stage's machine?",
                    ) from seen
                pause_s = min(MAX_RETRY_S, RETRY_S * 1.5 ** min(attempts, 20)) * random.uniform(0.7, 1.0)
                await asyncio.sleep(min(pause_s, deadline.remaining()))
                if deadline.remaining() == 0:
                    raise self._expired(deadline, f"{seen}; {attempts} attempts") from seen

    def _expired(self, deadline: Deadline, seen: str) -> DeadlineExceeded:
        if self.status is None:
            doing = f"bringing the code to {self._boot.where} ({seen})"
            return deadline.expired(doing, stage=self._stage, hint="the host may not forward its ports: another may")
        doing = f"waiting for pip at {self._boot.where} (try {self.status.pip_try}: {self.status.last_line})"
        error = deadline.expired(doing, stage=self._stage, hint="its network may be slow: another host may do better")
        error.detail = self.status.tail
        return error

    async def _attempt(self) -> None:
        """One connection, until the node starts. Raises _Seen for another attempt, BootFailed for none."""
        if self.status is None:
            claim = self._boot.proven(PUSH, len(self._payload), self.digest)
        else:
            claim = self._boot.proven(WATCH)
        async with claim as talk:
            if self.status is None:
                await talk.send(self._payload)
                self._sent = True
            while True:
                status = await talk.next_record()
                self._on_status(status)
                if status.state in second_stage.FINAL:
                    self._conclude(status)
                    self.status = status
                    return
                self.status = status

    def _conclude(self, status: BootStatus) -> None:
        if status.state == "failed":
            raise BootFailed(
                f"pip failed {status.pip_try} times: {status.last_line}",
                kind="pip",
                stage=self._stage,
                hint="the host may have no way to the package index: another may",
                detail=status.tail,
            )
        if status.state == "ended":
            raise BootFailed(
                f"the node ended at once with status {status.exit}: {status.last_line}",
                kind="ended",
                stage=self._stage,
                detail=status.tail,
            )


class _Seen(Exception):
    """What one attempt saw instead of what it wanted. silent: connected, and nobody spoke; proof: a wrong one."""

    def __init__(self, text: str, *, silent: bool = False, proof: bool = False) -> None:
        super().__init__(text)
        self.silent = silent
        self.proof = proof


class _Boot:
    """Where a boot listens, and how to come to a proven connection with it."""

    def __init__(self, host: str, port: int, secret: bytes, deadline: Deadline) -> None:
        self.where = f"{host}:{port}"
        self._host, self._port = host, port
        self._secret = secret
        self._deadline = deadline

    @asynccontextmanager
    async def proven(self, kind: bytes, size: int = 0, digest: bytes = bytes(32)) -> AsyncIterator[_Talk]:
        """A connection on which both sides have proven the secret; aborted when the block ends. Raises _Seen."""
        opened: list[asyncio.StreamWriter] = []
        try:
            reader = await self._within(CONNECT_S, self._connect(opened), "no answer to a connection attempt")
            talk = _Talk(self, reader, opened[0], self._secret)
            await talk.prove(kind, size, digest)
            yield talk
        except asyncio.IncompleteReadError as error:
            raise _Seen("it closed the connection") from error
        except OSError as error:
            raise _Seen(os.strerror(error.errno) if error.errno else str(error) or type(error).__name__) from error
        finally:
            for writer in opened:
                writer.transport.abort()

    async def _connect(self, opened: list[asyncio.StreamWriter]) -> asyncio.StreamReader:
        """Hands the writer out by itself: a cancellation must not lose a connection that has just come up."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        opened.append(writer)
        return reader

    async def _within(self, seconds: float, awaitable: Awaitable[T], otherwise: str, *, silent: bool = False) -> T:
        try:
            return await self._deadline.capped(seconds).wait(awaitable, doing=otherwise)
        except DeadlineExceeded as error:
            raise _Seen(otherwise, silent=silent) from error


class _Talk:
    """One connection to a boot."""

    def __init__(self, boot: _Boot, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
        self._within = boot._within
        self._reader = reader
        self._writer = writer
        self._secret = secret
        self._about = b""  # both nonces and the claim: what every proof on this connection is about
        self._records = 0

    async def prove(self, kind: bytes, size: int, digest: bytes) -> None:
        """Both sides' proofs. We show nothing that could be used elsewhere: a proof holds for one connection."""
        greeting = self._reader.readexactly(len(MAGIC) + NONCE_BYTES)
        greeting = await self._within(GREETING_S, greeting, "connected, but nothing greets", silent=True)
        if not greeting.startswith(MAGIC):
            raise _Seen("something else answers on this port")
        nonce = greeting[len(MAGIC) :]
        header = os.urandom(NONCE_BYTES) + kind + size.to_bytes(8, "big") + digest
        self._about = nonce + header
        self._writer.write(header + proof(self._secret, b"peer", self._about))
        try:
            answer = self._reader.readexactly(PROOF_BYTES)
            answer = await self._within(PROOF_S, answer, "no answer to our proof")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise _Seen("it did not accept our proof of the stage's secret", proof=True) from error
        if not hmac.compare_digest(answer, proof(self._secret, b"boot", self._about)):
            raise _Seen("it could not prove the stage's secret", proof=True)

    async def send(self, payload: bytes) -> None:
        self._writer.write(payload)
        await self._within(BODY_S, self._writer.drain(), "it took the code too slowly")

    async def next_record(self) -> BootStatus:
        """The next record. Raises _Seen for a wrong proof or shape, and when no more come on this connection."""
        wait_s = RECORD_S if self._records else BODY_S  # before the first, the payload is on its way
        size = int.from_bytes(await self._within(wait_s, self._reader.readexactly(4), "it fell silent"), "big")
        if size > MAX_RECORD_BYTES:
            raise _Seen(f"a record of {size} bytes")
        record = await self._within(RECORD_S, self._reader.readexactly(size + PROOF_BYTES), "it fell silent")
        text, told = record[:size], record[size:]
        count = self._records.to_bytes(4, "big")
        if not hmac.compare_digest(told, proof(self._secret, b"told", self._about + count + text)):
            raise _Seen("a record that it could not prove", proof=True)
        self._records += 1
        try:
            return BootStatus.read(text)
        except ValueError as error:
            raise _Seen(f"a record that does not read: {error}") from error
