"""The blocking exchange: its deadline has two watchers, and whichever is first, the caller reads the same words."""

import socket
import threading

import pytest

from ppsmoke.rent.api_key import ApiKey
from ppsmoke.rent.vast_http import NoReply, UrllibTransport


class NeverOnTime(threading.Timer):
    """A timer whose thread does not get to run, as on a machine that has much to do."""

    def start(self) -> None:
        pass


@pytest.mark.parametrize("timer", [threading.Timer, NeverOnTime])
def test_an_answer_that_does_not_come_is_named_by_its_deadline(timer, monkeypatch):
    monkeypatch.setattr("ppsmoke.rent.vast_http.threading.Timer", timer)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        transport = UrllibTransport(f"http://127.0.0.1:{silent.getsockname()[1]}", ApiKey("a-key-0123456789"))
        with pytest.raises(NoReply, match=r"no complete answer within 0\.1 s"):
            transport.exchange("GET", "/api/v0/users/current/", body=None, within_s=0.1)
