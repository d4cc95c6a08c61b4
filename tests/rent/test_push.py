"""Our side of the code push against boots that are late, silent, wrong, lying or interrupted."""

import asyncio
import gc
import hashlib
import json
import warnings

import pytest

from ppsmoke.errors import DeadlineExceeded
from ppsmoke.rent import push as push_module
from ppsmoke.rent.process_one import HEADER_BYTES, MAGIC, proof
from ppsmoke.rent.push import BootFailed, BootStatus, ask_boot, push
from ppsmoke.waiting import Deadline
from tests.lab.small_container import free_port

SECRET = b"s" * 32
NONCE = b"N" * 32
PAYLOAD = b"\0\0\0\2{}code"


class Peer:
    """The boot's end of one connection, for a script to act it."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.about, self.records = b"", 0

    async def greet(self, secret=SECRET):
        """Greeting and both proofs; the kind of what the other side wants."""
        self.writer.write(MAGIC + NONCE)
        said = await self.reader.readexactly(HEADER_BYTES + 32)
        self.about = NONCE + said[:HEADER_BYTES]
        self.said = said
        self.writer.write(proof(secret, b"boot", self.about))
        return said[32:33]

    async def take(self):
        return await self.reader.readexactly(int.from_bytes(self.about[65:73], "big"))

    def tell(self, secret=SECRET, number=None, text=None, **fields):
        text = text or json.dumps(fields).encode()
        number = (self.records if number is None else number).to_bytes(4, "big")
        self.records += 1
        self.writer.write(len(text).to_bytes(4, "big") + text + proof(secret, b"told", self.about + number + text))


def pushed_to(*scripts, within_s=10.0, secret=SECRET, seen=None):
    """Push to a server that meets its first connection with the first script, the next with the next, the last one
    over and over. The report or error, and how many connections there were."""
    connections = []

    async def scene():
        async def serve(reader, writer):
            connections.append(1)
            try:
                await scripts[min(len(connections), len(scripts)) - 1](Peer(reader, writer))
                await writer.drain()
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            return await push(
                "127.0.0.1",
                server.sockets[0].getsockname()[1],
                secret,
                PAYLOAD,
                deadline=Deadline.after(within_s, phase="boot"),
                stage=0,
                on_status=(lambda status: None) if seen is None else seen.append,
            )
        finally:
            server.close()

    try:
        return asyncio.run(scene()), len(connections)
    except (BootFailed, DeadlineExceeded) as error:
        return error, len(connections)


async def good(peer):
    assert await peer.greet() == b"P" and await peer.take() == PAYLOAD
    peer.tell(state="accepted")
    peer.tell(state="starting", dead_man="armed", pip_s=3, python="3.12.1")


async def hangs_up(peer):
    pass


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(push_module, "RETRY_S", 0.01)


@pytest.fixture
def short_waits(monkeypatch):
    monkeypatch.setattr(push_module, "GREETING_S", 0.2)
    monkeypatch.setattr(push_module, "RECORD_S", 0.2)


def test_the_payload_goes_out_after_both_proofs_and_the_report_says_how_it_went():
    report, connections = pushed_to(good)
    assert (report.attempts, report.payload_bytes, report.confirmed, connections) == (1, len(PAYLOAD), True, 1)
    assert report.sha256 == hashlib.sha256(PAYLOAD).hexdigest()
    assert (report.status.python, report.status.pip_s, report.status.warning) == ("3.12.1", 3.0, "")


async def talks_http(peer):
    peer.writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")


async def silent(peer):
    await asyncio.sleep(1)


async def cut_after_our_proof_once(peer):
    peer.writer.write(MAGIC + NONCE)
    await peer.reader.readexactly(HEADER_BYTES + 32)


async def silent_after_the_payload(peer):
    await peer.greet()
    await peer.take()
    peer.tell(state="accepted")
    await asyncio.sleep(1)


@pytest.mark.parametrize("first", [hangs_up, talks_http, cut_after_our_proof_once])
def test_a_port_that_is_not_yet_the_boots_is_tried_again(first):
    report, connections = pushed_to(first, hangs_up, good)
    assert report.confirmed and report.attempts == connections == 3


@pytest.mark.usefixtures("short_waits")
def test_a_port_where_nobody_speaks_is_tried_again():
    report, connections = pushed_to(silent, good)
    assert report.confirmed and connections > 1


def test_a_port_that_is_not_yet_open_is_tried_again():
    async def scene():
        port = free_port()

        async def later():
            await asyncio.sleep(0.1)

            async def serve(reader, writer):
                await good(Peer(reader, writer))
                writer.close()

            return await asyncio.start_server(serve, "127.0.0.1", port)

        opening = asyncio.ensure_future(later())
        report = await push("127.0.0.1", port, SECRET, PAYLOAD, deadline=Deadline.after(10))
        (await opening).close()
        return report

    assert asyncio.run(scene()).attempts > 1


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("break_off", [cut_after_our_proof_once, silent_after_the_payload])
def test_a_broken_connection_is_taken_up_again_where_it_was(break_off):
    kinds = []

    async def again(peer):
        kinds.append(await peer.greet())
        if kinds[-1] == b"P":
            await peer.take()
        peer.tell(state="starting")

    report, _ = pushed_to(break_off, again)
    assert report.confirmed and kinds[-1] == (b"W" if break_off is silent_after_the_payload else b"P")


def test_a_watcher_comes_again_when_the_boot_ends_a_long_watch():
    async def watch(peer):
        assert await peer.greet() == b"W"
        peer.tell(state="starting")

    async def accepts(peer):
        await peer.greet()
        await peer.take()
        peer.tell(state="accepted")

    report, connections = pushed_to(accepts, watch)
    assert report.confirmed and connections == 2


@pytest.mark.slow
@pytest.mark.usefixtures("short_waits")
def test_a_port_that_changed_hands_after_the_payload_means_that_the_node_is_there():
    report, _ = pushed_to(silent_after_the_payload, silent)
    assert not report.confirmed and report.status.state == "accepted"


async def impostor(peer):
    await peer.greet(secret=b"x" * 32)


async def mirror(peer):
    peer.writer.write(MAGIC + NONCE)
    said = await peer.reader.readexactly(HEADER_BYTES + 32)
    peer.writer.write(said[-32:])  # our own proof, sent back


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (impostor, "it could not prove the stage's secret"),
        (mirror, "it could not prove the stage's secret"),
        (cut_after_our_proof_once, "it did not accept our proof of the stage's secret"),
    ],
)
def test_a_wrong_proof_is_named_after_a_few_tries_and_the_payload_never_leaves(script, words):
    error, connections = pushed_to(script)
    assert isinstance(error, BootFailed) and error.kind == "proof" and words in str(error)
    assert connections == push_module.MAX_WRONG_PROOFS


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"state": "starting", "secret": b"x" * 32}, "a record that it could not prove"),
        ({"state": "starting", "number": 1}, "a record that it could not prove"),  # one of another moment
        ({"text": b"[1]"}, "a record that is no object"),
        ({"text": b"{"}, "a record that does not read"),
        ({"text": b" " * (64 << 10) + b"1"}, "a record of 65537 bytes"),
    ],
)
def test_a_record_that_is_not_proven_or_makes_no_sense_is_not_believed(record, words):
    async def scene():
        async def serve(reader, writer):
            peer = Peer(reader, writer)
            assert await peer.greet() == b"W"
            peer.tell(**record)
            try:
                await reader.read()
            except ConnectionError:
                pass
            writer.close()
            ended.set()

        ended = asyncio.Event()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            await ask_boot("127.0.0.1", port, SECRET, deadline=Deadline.after(10))
        finally:
            await asyncio.wait_for(ended.wait(), 10)
            server.close()

    with pytest.raises(BootFailed, match=words):
        asyncio.run(scene())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"state": "failed", "pip_try": 3, "tail": "Collecting x\nERROR: no network\n[notice] new pip"},
            "boot, stage 0: pip failed 3 times: ERROR: no network",
        ),
        (
            {"state": "ended", "exit": 1, "tail": "Traceback\nImportError: no x\n"},
            "boot, stage 0: the node ended at once with status 1: ImportError: no x",
        ),
        ({"state": "failed", "tail": ""}, "boot, stage 0: pip failed 0 times: no output"),
    ],
)
def test_what_failed_in_the_container_is_the_error(fields, words):
    async def fails(peer):
        await peer.greet()
        await peer.take()
        peer.tell(**fields)

    error, connections = pushed_to(fails)
    assert str(error) == words and error.detail == fields["tail"] and connections == 1


@pytest.mark.slow
def test_a_deadline_says_what_was_seen_last_and_how_often_it_was_tried():
    error, connections = pushed_to(talks_http, within_s=0.5)
    assert isinstance(error, DeadlineExceeded) and error.phase == "boot" and error.stage == 0
    assert f"something else answers on this port; {connections} attempts): 0.5 s spent" in str(error)


@pytest.mark.slow
def test_a_deadline_that_passes_while_pip_runs_says_so_in_pips_words():
    async def slow(peer):
        await peer.greet()
        await peer.take()
        while True:
            peer.tell(state="accepted", pip_try=2, tail="Collecting numpy\n  Downloading numpy.whl (15.7 MB)\n")
            await peer.writer.drain()
            await asyncio.sleep(0.05)

    error, _ = pushed_to(slow, within_s=0.4)
    assert isinstance(error, DeadlineExceeded) and error.detail.startswith("Collecting numpy")
    assert "(try 2: Downloading numpy.whl (15.7 MB)): 0.4 s spent" in str(error)


def test_a_status_with_fields_of_other_kinds_reads_as_if_they_were_missing_and_its_text_is_harmless():
    text = {"state": 7, "python": None, "pip_try": "x", "pip_s": True, "exit": "0", "tail": "a\x1b]0;b\x07\tc\n\u202ed"}
    status = BootStatus.read(json.dumps(text).encode())
    assert (status.state, status.python, status.pip_try, status.pip_s, status.exit) == ("", "", 0, 0.0, None)
    assert status.tail == "a?]0;b?\tc\n?d"


@pytest.mark.parametrize(
    ("text", "pip_s"),
    [
        (b'{"pip_s": 1e400}', 0.0),
        (b'{"pip_s": 1%s}' % (b"0" * 400), 0.0),
        (b'{"pip_s": NaN}', 0.0),
        (b'{"pip_s": 2}', 2.0),
    ],
    ids=["infinite", "too large for a float", "not a number", "two seconds"],
)
def test_a_number_that_no_boot_would_say_reads_as_if_it_were_missing(text, pip_s):
    assert BootStatus.read(text).pip_s == pip_s


def test_a_record_that_is_nested_without_end_is_no_record():
    with pytest.raises(ValueError, match="nested"):
        BootStatus.read(b"[" * push_module.MAX_RECORD_BYTES)


@pytest.mark.parametrize("moment", ["connected", "proven", "sent"])
def test_a_push_that_is_cancelled_leaves_no_connection_behind(moment):
    async def scene():
        async def serve(reader, writer):
            peer = Peer(reader, writer)
            try:
                reached("connected")
                await peer.greet()
                reached("proven")
                await peer.take()
                reached("sent")
                assert await reader.read() == b""
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            ended.set()
            writer.close()

        def reached(what):
            if what == moment:
                pushing.cancel()

        ended = asyncio.Event()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pushing = asyncio.ensure_future(push("127.0.0.1", port, SECRET, PAYLOAD, deadline=Deadline.after(20)))
        await asyncio.wait({pushing}, timeout=10)
        assert pushing.cancelled()
        await asyncio.wait_for(ended.wait(), 10)
        server.close()
        await asyncio.sleep(0.01)

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        asyncio.run(scene())
        gc.collect()


def test_asking_a_boot_where_none_is_says_so():
    with pytest.raises(BootFailed, match="refused"):
        asyncio.run(ask_boot("127.0.0.1", free_port(), SECRET, deadline=Deadline.after(5)))
