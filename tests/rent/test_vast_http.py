"""One exchange of the client, to its sockets: deadlines, TLS, and the key, which goes to the configured host alone."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest

from ppsmoke.errors import UsageError
from ppsmoke.rent import vast_http
from ppsmoke.rent.api_key import ApiKey
from ppsmoke.rent.vast_api import VastApi
from ppsmoke.rent.vast_http import NoReply, UrllibTransport, check_base_url
from ppsmoke.rent.verdicts import OfferLost, Refused
from tests.rent.vast_lab import KEY, FakeTime, run


def test_bytes_that_drip_for_ever_end_at_the_deadline_too():
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(b"HTTP/1.1 200 OK\r\n")
                while not stop.wait(0.02):
                    try:
                        peer.sendall(b"X: y\r\n")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        transport = UrllibTransport(f"http://127.0.0.1:{server.getsockname()[1]}", ApiKey(KEY))
        try:
            with pytest.raises(NoReply, match=r"0\.3 s") as caught:
                transport.exchange("GET", "/", body=None, within_s=0.3)
        finally:
            stop.set()
            thread.join()
    assert caught.value.sent


@pytest.mark.parametrize("trusted", [True, False])
def test_https_is_spoken_to_whom_the_system_trusts_only(monkeypatch, trusted):
    pem = Path(__file__).parents[1] / "data" / "lab-tls.pem"  # self-signed, for 127.0.0.1; its key opens nothing else
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(pem)
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            try:
                with server_side.wrap_socket(server.accept()[0], server_side=True) as peer:
                    asked.append(peer.recv(4096))
                    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            except OSError:
                pass  # refused by the client

        thread = threading.Thread(target=answer)
        thread.start()
        if trusted:
            monkeypatch.setattr(vast_http, "_tls", lambda: ssl.create_default_context(cafile=str(pem)))
        transport = UrllibTransport(f"https://127.0.0.1:{server.getsockname()[1]}", ApiKey(KEY))
        try:
            if trusted:
                assert transport.exchange("GET", "/x/", body=None, within_s=10.0).json == {}
            else:
                with pytest.raises(NoReply, match="TLS") as caught:
                    transport.exchange("GET", "/x/", body=None, within_s=10.0)
                assert not caught.value.sent
        finally:
            thread.join()
    assert [KEY.encode() in request for request in asked] == ([True] if trusted else [])


def test_a_key_that_the_service_echoes_is_not_shown():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                asked = peer.recv(4096)
                assert KEY.encode() in asked
                body = b'{"success": false, "error": "invalid_args", "msg": "no permission for %s"}' % KEY.encode()
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

        thread = threading.Thread(target=answer)
        thread.start()
        transport = UrllibTransport(f"http://127.0.0.1:{server.getsockname()[1]}", ApiKey(KEY))
        with pytest.raises(Refused) as caught:
            run(VastApi(transport, clock=FakeTime()).user())
        thread.join()
    assert KEY not in str(caught.value) and "[key]" in str(caught.value)


def test_nobody_listening_is_known_as_not_sent():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    transport = UrllibTransport(f"http://127.0.0.1:{port}", ApiKey(KEY))
    with pytest.raises(NoReply, match="refused") as caught:
        transport.exchange("PUT", "/api/v0/asks/1/", body=b"{}", within_s=5.0)
    assert not caught.value.sent
    api = VastApi(transport, clock=FakeTime())
    assert isinstance(run(api.create(1, {})), OfferLost)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/x"])
def test_a_result_url_is_fetched_over_http_only(url):
    with pytest.raises(NoReply):
        UrllibTransport("http://127.0.0.1:1", ApiKey(KEY)).fetch(url, within_s=1.0, max_bytes=10)


@pytest.mark.parametrize(("url", "ok"), [
    ("https://console.vast.ai", True), ("https://console.vast.ai/", True), ("http://127.0.0.1:8080", True),
    ("http://localhost:1", True), ("http://10.1.2.3:80", True), ("http://console.vast.ai", False),
    ("http://8.8.8.8", False), ("ftp://127.0.0.1", False), ("console.vast.ai", False), ("", False),
    ("https://user:secret@console.vast.ai", False), ("https://console.vast.ai/?api_key=1", False),
])  # fmt: skip
def test_the_key_goes_only_where_it_may(url, ok):
    if ok:
        assert check_base_url(url) == url.rstrip("/")
    else:
        with pytest.raises(UsageError) as caught:
            check_base_url(url)
        assert "secret" not in str(caught.value)


class NeverOnTime(threading.Timer):
    """A timer whose thread does not get to run, as on a machine that has much to do."""

    def start(self) -> None:
        pass


@pytest.mark.parametrize("timer", [threading.Timer, NeverOnTime])
def test_an_answer_that_does_not_come_is_named_by_its_deadline(timer, monkeypatch):
    monkeypatch.setattr("ppsmoke.rent.vast_http.threading.Timer", timer)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        transport = UrllibTransport(f"http://127.0.0.1:{silent.getsockname()[1]}", ApiKey(KEY))
        with pytest.raises(NoReply, match=r"no complete answer within 0\.1 s"):
            transport.exchange("GET", "/api/v0/users/current/", body=None, within_s=0.1)
