"""The decoders beyond the cluster: what stages tell the orchestrator and each other, a worker's replies, the boot."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import random
import tempfile
from types import SimpleNamespace
from typing import Any

from ppsmoke.cluster.addresses import Delivery
from ppsmoke.errors import SmokeError, StageError
from ppsmoke.inbox import Inbox
from ppsmoke.pipeline import messages
from ppsmoke.pipeline.intake import Intake
from ppsmoke.pipeline.operations import Hidden, Loaded, Operations
from ppsmoke.rent import process_one, push
from ppsmoke.rent.process_one import HEADER_BYTES, MAGIC, ProcessOne, proof, receive
from ppsmoke.report.progress import Progress
from ppsmoke.report.summary import RunRecord
from tests.lab.fuzz.mutate import mutated, mutated_json
from tests.lab.fuzz.plain import MESSAGES
from tests.lab.fuzz.still_loop import still_loop, to_its_end
from tests.lab.fuzz.target import Target

SECRET = b"s" * 32
ROLES = ("stage-0-of-2", "stage-1-of-2", "orchestrator", "stage-0-of-3")
TALES: list[Any] = [
    {"fingerprint": "aa", "blocks": [0, 3], "total_blocks": 6, "device": "CPU", "weight_bytes": 5, "load_s": 1.5,
     "warmup_s": 0.5, "context": 2048, "model": {"name": "m", "sha256": None}, "peak_rss_bytes": 7},
    [{"to": "stage-1-of-2", "path": "direct", "rtt_ms": 1.25}, {"to": "x", "path": "relayed", "rtt_ms": None}],
    {"prefill_us": 100, "token_us": [100, 20], "stage_us": [[60, 30], [8, 7]]},
]  # fmt: skip
RECORDS = [
    {"state": "accepted", "python": "3.12.1", "dead_man": "armed", "dead_man_restarts": 0, "pip_try": 1, "pip_s": 0.0,
     "exit": None, "tail": "Collecting tinygrad\n"},
    {"state": "failed", "python": "3.12.1", "dead_man": "no key", "dead_man_restarts": 2, "pip_try": 3, "pip_s": 9.5,
     "exit": 1, "tail": "ERROR: no"},
]  # fmt: skip
REPLIES = [
    {"request_id": 1, "hidden_b64": "AAAAAAAA", "dtype": "bfloat16", "seq_len": 1, "compute_us": 5},
    {"request_id": 1, "token_id": 42, "compute_us": 5},
    {"request_id": 1, "tokens": [1, 2, 3]},
    {"request_id": 1, "text": "Hi"},
    {"status": "ready", "chunk": 32, "context": 2048, "hidden_dim": 576, "eog": [2]},
]


class _Letters:
    """A mailbox with these messages, and no more."""

    class Empty(Exception):
        """All have been taken."""

    def __init__(self, *payloads: bytes, role: str) -> None:
        self._left = [Delivery("0" * 16, role, payload) for payload in payloads]

    async def receive(self) -> Delivery:
        if not self._left:
            raise self.Empty
        return self._left.pop(0)


def inbox(data: bytes) -> None:
    """A message to the orchestrator, then all that a run's end makes of it; the first byte says who sent it."""
    role = ROLES[data[0] % len(ROLES)] if data else ROLES[0]
    with still_loop():
        record = RunRecord(run_id="r", model_name="m", num_stages=2)
        progress = Progress(record, stream=io.StringIO(), verbosity=2)
        desk = Inbox(_Letters(data[1:], role=role), progress, 2)
        desk.expect(1)
        try:
            to_its_end(desk.pump())
        except _Letters.Empty:
            pass
        if desk._answer is not None:
            record.take_answer(desk._answer)
        record.links = desk.links_json(SimpleNamespace(role="orchestrator", links=lambda: []))
        json.dumps(record.to_json(), allow_nan=False)
        record.lines()
        assert set(desk._heard) <= {0, 1} and desk._stuck() in (0, 1)
        if desk._failure.done():
            desk._failure.exception() if desk._failure.cancelled() else desk._failure.result()
        if desk.refused:
            raise StageError("refused")


def inbox_input(rng: random.Random) -> bytes:
    role = bytes([rng.getrandbits(8)])
    if rng.random() < 0.5:
        return role + mutated(rng, [messages.encode(one) for one in MESSAGES])
    tale = mutated_json(rng, TALES)
    tale = tale.encode("utf-8", "replace").decode()
    if rng.random() < 0.3:
        answer = messages.InferenceResponse(
            request_id=1, finish_reason="stop", token_ids=(5, 2), prompt_token_ids=(1,), text="Hi", timings_json=tale
        )
        return b"\x01" + messages.encode(answer)
    stage = rng.getrandbits(1)
    state = rng.choice(("ready", "linked"))
    told = messages.StageStatus(stage=stage, state=state, done=1, total=2, token_id=-1, detail_json=tale)
    return bytes([stage]) + messages.encode(told)


def intake(data: bytes) -> None:
    """A message to stage 0, or 1 of 2, by the first byte."""
    stage, role = (data[0] & 1, ROLES[data[0] // 2 % len(ROLES)]) if data else (0, ROLES[0])
    refused: list[SmokeError] = []
    with still_loop():
        letters = _Letters(data[1:], data[1:], role=role)
        taking = Intake(
            letters, stage=stage, num_stages=2, busy_grace_s=1, refused=lambda request, error: refused.append(error)
        )
        try:
            to_its_end(taking.run())
        except _Letters.Empty:
            pass
        if not taking._waiting.empty():
            assert role in ("orchestrator", "stage-0-of-2", "stage-1-of-2"), f"{role} is no member of this run"
    if refused:
        raise StageError(refused[0].cause)


def intake_input(rng: random.Random) -> bytes:
    return bytes([rng.getrandbits(8)]) + mutated(rng, [messages.encode(one) for one in MESSAGES])


def worker_reply(data: bytes) -> None:
    """A worker's line as each operation reads it. StageError is what a person sees of nonsense."""
    try:
        reply = json.loads(data)
    except (ValueError, RecursionError):
        raise StageError("no JSON") from None
    if not isinstance(reply, dict):
        raise StageError("no object")

    async def call(op: str, *, deadline_s: float, **fields: Any) -> dict[str, Any]:
        return reply

    operations = Operations(SimpleNamespace(call=call), stage=0)
    hidden = Hidden(bytes(4), "bfloat16", 1)
    refusals = []
    for verb in (
        lambda: to_its_end(operations.forward(1, hidden, 0)),
        lambda: to_its_end(operations.forward_and_sample(1, hidden, 0, sample=True)),
        lambda: to_its_end(operations.tokenize(1, "", raw=True)),
        lambda: to_its_end(operations.detokenize(1, [1])),
        lambda: Loaded.parse(reply, stage=0),
    ):
        try:
            verb()
        except StageError as error:
            refusals.append(error)
    if len(refusals) == 5:
        raise refusals[0]


def boot_status(data: bytes) -> None:
    status = push.BootStatus.read(data)
    assert status.last_line and f"{status.pip_s:.1f}" and isinstance(status.warning, str)


class _Boot:
    """The other end of a push as `_Talk` sees it. The first byte says what it can prove; the rest is what it says."""

    def __init__(self, data: bytes) -> None:
        self._proves = data[0] if data else 0
        self._left = data[1:]
        self._about = b""
        self._told = b""

    def write(self, data: bytes) -> None:
        self._about += data[:HEADER_BYTES]

    async def readexactly(self, count: int) -> bytes:
        if count == push.PROOF_BYTES and self._proves & 1:
            return proof(SECRET, b"boot", self._about)
        taken, self._left = self._left[:count], self._left[count:]
        if len(taken) < count:
            raise asyncio.IncompleteReadError(taken, count)
        if not self._about:
            self._about = taken[len(MAGIC) :]
        elif self._proves & 2 and count > push.PROOF_BYTES:
            text = taken[: -push.PROOF_BYTES]
            return text + proof(SECRET, b"told", self._about + bytes(4) + text)
        return taken


def push_talk(data: bytes) -> None:
    boot = _Boot(data)

    async def within(seconds: float, awaitable: Any, otherwise: str, *, silent: bool = False) -> Any:
        return await awaitable

    talk = push._Talk(SimpleNamespace(_within=within), boot, boot, SECRET)
    to_its_end(talk.prove(push.PUSH, 10, bytes(32)))
    to_its_end(talk.next_record())


def push_input(rng: random.Random) -> bytes:
    text = mutated_json(rng, RECORDS).encode("utf-8", "replace")[: push.MAX_RECORD_BYTES]
    record = len(text).to_bytes(4, "big") + text + bytes(push.PROOF_BYTES)
    stream = MAGIC + bytes(push.NONCE_BYTES) + record
    if rng.random() < 0.4:
        stream = mutated(rng, [stream])
    return bytes([rng.choice((0, 1, 3, 3, 3))]) + stream


class _Caller:
    """A socket whose other end pushes; the first byte says whether it can prove the secret."""

    def __init__(self, data: bytes) -> None:
        self._proves = bool(data and data[0] & 1)
        self._left = data[1:]

    def sendall(self, data: bytes) -> None:
        if data.startswith(MAGIC) and self._proves:
            header = self._left[:HEADER_BYTES]
            about = data[len(MAGIC) :] + header
            self._left = header + proof(SECRET, b"peer", about) + self._left[HEADER_BYTES:]

    def settimeout(self, seconds: float) -> None: ...

    def recv(self, count: int) -> bytes:
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    def __enter__(self) -> _Caller:
        return self

    def __exit__(self, *error: object) -> None: ...


_FOLDER = tempfile.TemporaryDirectory(prefix="ppsmoke-fuzz-")


def boot_peer(data: bytes) -> None:
    """The boot's own side, which drops whatever is wrong: an OSError here, anything else is a mistake."""
    one = ProcessOne({"PPSMOKE_NODE_SECRET": SECRET.hex(), "PPSMOKE_NODE_DIR": _FOLDER.name}, "", ())
    said: list[str] = []
    one.welcome = lambda peer, secret, about: receive(peer, about)
    caller = _Caller(data)
    one.peers.append(caller)
    say, process_one.say = process_one.say, lambda text: said.append(str(text))
    try:
        one.meet(caller)
    finally:
        process_one.say = say
    assert not one.peers
    if said:
        assert "OSError" in said[0] or "OverflowError" in said[0], said[0]
        raise OSError(said[0])


def boot_input(rng: random.Random) -> bytes:
    payload = rng.randbytes(rng.randrange(60))
    header = bytes(32) + b"P" + len(payload).to_bytes(8, "big") + hashlib.sha256(payload).digest()
    return bytes([rng.getrandbits(8)]) + mutated(rng, [header + payload])


def _json_input(corpus: list[Any]):
    return lambda rng: mutated_json(rng, corpus).encode("utf-8", "replace")


def targets() -> list[Target]:
    wrong = (push._Seen, asyncio.IncompleteReadError)
    return [
        Target("inbox", inbox, (StageError,), generate=inbox_input),
        Target("intake", intake, (StageError,), generate=intake_input),
        Target("worker-reply", worker_reply, (StageError,), generate=_json_input(REPLIES)),
        Target("boot-status", boot_status, (ValueError,), generate=_json_input(RECORDS)),
        Target("push-talk", push_talk, wrong, generate=push_input),
        Target("boot-peer", boot_peer, (OSError,), generate=boot_input),
    ]
