"""Our client's requests beside the official client's (vastai 1.9.1, as recorded) for the same actions: what differs is
listed with its reason, and nothing else may. tests/lab/test_fake_vast_official.py records the same ones anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from ppsmoke import __version__
from ppsmoke.rent.create import Machine
from ppsmoke.rent.offers import LONGEST_FACTOR, SLACK_RAM, Wanted
from ppsmoke.rent.vast_api import VastApi
from ppsmoke.rent.verdicts import Created
from tests.lab.fake_vast import FakeVast
from tests.lab.fake_vast.replies import Request
from tests.rent.vast_lab import client, run

ABSENT = "(absent)"
ORDER_BY = "%5B%7B%22col%22%3A+%22id%22%2C+%22dir%22%3A+%22asc%22%7D%5D"
HEADERS = {"authorization": "<redacted>", "user-agent": "vastai-cli/1.9.1", "accept": "*/*",
           "accept-encoding": "gzip, deflate"}  # fmt: skip
WITH_BODY = {**HEADERS, "content-type": "application/json"}
HOP = ("host", "connection", "content-length")  # of the connection, not of the call

# What the official client sends, as (method, path, body, headers); ASK and ID stand for numbers. The fake keeps the
# bearer's key apart from the headers.
RECORDED: dict[str, tuple[str, str, Any, Mapping[str, str]]] = {
    # search offers 'gpu_name=RTX_4090 num_gpus=1 gpu_ram>=20 reliability>0.98 duration>=2 geolocation notin [CN,VN]
    #     direct_port_count>=2' -o dph_total --limit 5
    "search": ("POST", "/api/v0/bundles/", {
        "verified": {"eq": True}, "external": {"eq": False}, "rentable": {"eq": True}, "gpu_name": {"eq": "RTX 4090"},
        "num_gpus": {"eq": "1"}, "gpu_ram": {"gte": 20000.0}, "reliability": {"gt": "0.98"},
        "duration": {"gte": 172800.0}, "geolocation": {"notin": ["CN", "VN"]}, "direct_port_count": {"gte": "2"},
        "order": [["dph_total", "asc"]], "type": "on-demand", "limit": 5, "allocated_storage": 5.0,
    }, WITH_BODY),
    # create instance ASK --image I --disk 40 --label run-1 --cancel-unavail --args -c 'echo hi'
    #     --env '-e A=b -e C=d=e -p 8080:8080 -p 8081:8081/udp -p 70000:70000'
    "create": ("PUT", "/api/v0/asks/ASK/", {
        "client_id": "me", "image": "I", "price": None, "disk": 40.0, "label": "run-1", "extra": None, "onstart": None,
        "env": {"A": "b", "C": "d=e", "-p 8080:8080": "1", "-p 8081:8081/udp": "1", "-p 70000:70000": "1"},
        "image_login": None, "python_utf8": False, "lang_utf8": False, "use_jupyter_lab": False, "jupyter_dir": None,
        "force": False, "cancel_unavail": True, "template_hash_id": None, "user": None, "runtype": "args",
        "args": ["-c", "echo hi"],
    }, WITH_BODY),
    # create instance ASK --image I --disk 40 --label run-1 --entrypoint /bin/sh --args -c 'echo hi'
    "create with an entrypoint": ("PUT", "/api/v0/asks/ASK/", {
        "client_id": "me", "image": "I", "price": None, "disk": 40.0, "label": "run-1", "extra": None,
        "onstart": "/bin/sh", "env": {}, "image_login": None, "python_utf8": False, "lang_utf8": False,
        "use_jupyter_lab": False, "jupyter_dir": None, "force": False, "cancel_unavail": False,
        "template_hash_id": None, "user": None, "runtype": "args", "args": ["-c", "echo hi"],
    }, WITH_BODY),
    "show": ("GET", "/api/v0/instances/ID/?owner=me", None, HEADERS),  # show instance ID
    "list": ("GET", f"/api/v1/instances/?select_filters=%7B%7D&order_by={ORDER_BY}&limit=25", None,
             HEADERS),  # show instances --raw
    "logs": ("PUT", "/api/v0/instances/request_logs/ID/", {"filter": "err", "tail": "50"},
             WITH_BODY),  # logs ID --tail 50 --filter err
    "destroy": ("DELETE", "/api/v0/instances/ID/", {}, WITH_BODY),  # destroy instance ID -y
    "user": ("GET", "/api/v0/users/current", None, HEADERS),  # show user
}  # fmt: skip

# (action, or "every"; what) -> theirs, ours, why.
DIFFERENCES: dict[tuple[str, str], tuple[Any, Any, str]] = {
    ("every", "header user-agent"): ("vastai-cli/1.9.1", f"ppsmoke/{__version__}", "we say who we are"),
    ("every", "header accept"): (
        "*/*", "application/json, text/plain, */*", "what we can read; a plain-text 429 included"),
    ("every", "header accept-encoding"): ("gzip, deflate", "identity", "urllib does not decompress"),
    ("search", "limit"): (5, 1000, "a small limit was a budget of offers looked at; replies are capped at 64 anyway"),
    ("search", "num_gpus"): ({"eq": "1"}, {"eq": 1}, "the CLI sends the query's text; the service takes numbers"),
    ("search", "direct_port_count"): ({"gte": "2"}, {"gte": 2}, "as num_gpus"),
    ("search", "reliability"): ({"gt": "0.98"}, ABSENT, "asked as reliability2"),
    ("search", "reliability2"): (ABSENT, {"gte": 0.98}, "most clients' name; at least, as our option"),
    ("search", "geolocation"): ({"notin": ["CN", "VN"]}, {"in": ["SE", "DE"]}, "--region names the wanted ones"),
    ("search", "disk_space"): (ABSENT, {"gte": 5.0}, "a need of ours that the recorded query had not"),
    ("search", "cuda_max_good"): (ABSENT, {"gte": 12.4}, "as disk_space"),
    ("search", "inet_down"): (ABSENT, {"gte": 100.0}, "as disk_space"),
    ("search", "dph_total"): (ABSENT, {"lte": 1.0}, "as disk_space"),
    ("create with an entrypoint", "cancel_unavail"): (
        False, True, "rather no instance than a stopped one whose storage is billed: we always send it"),
    ("logs", "filter"): ("err", ABSENT, "we show the log's last lines as they are"),
    ("user", "path"): (
        "/api/v0/users/current", "/api/v0/users/current/", "a missing slash may be redirected, which we refuse"),
}  # fmt: skip


@pytest.fixture(scope="module")
def ours() -> Iterator[dict[str, list[Request]]]:
    """What our client sent for each action, in order."""
    with FakeVast() as fake:
        yield run(_act(fake, client(fake)))
        assert fake.ledger()["leaks"] == {} and fake.ledger()["decoys_touched"] == 0


async def _act(fake: FakeVast, api: VastApi) -> dict[str, list[Request]]:
    wanted = Wanted(download_bytes=0, disk_gb=5.0, gpu_name="RTX 4090", min_gpu_ram_mb=20000 / SLACK_RAM,
                    regions=("SE", "DE"), lifetime_s=2 * 86400 / LONGEST_FACTOR)  # fmt: skip
    plain = Machine(image="I", disk_gb=40, env={"A": "b", "C": "d=e"}, ports=("8080/tcp", "8081/udp", "70000/tcp"),
                    args=("-c", "echo hi"))  # fmt: skip
    shell = Machine(image="I", disk_gb=40, entrypoint="/bin/sh", args=("-c", "echo hi"))
    sent: dict[str, list[Request]] = {}

    async def note(action: str, call: Any) -> Any:
        before = len(fake.requests)
        result = await call
        sent[action] = fake.requests[before:]
        return result

    await note("user", api.user())
    await note("search", api.search(wanted.search_filters(), max_pages=1))
    asks = [fake.offers[0].ask_id, fake.offers[1].ask_id]
    made = await note("create", api.create(asks[0], plain.to_body("run-1")))
    assert isinstance(made, Created)
    fake.clock.advance(1)
    assert isinstance(await note("create with an entrypoint", api.create(asks[1], shell.to_body("run-1"))), Created)
    fake.clock.advance(120)
    await note("show", api.instance(made.instance_id))
    await note("list", api.instances())
    await note("logs", api.logs(made.instance_id, tail=50))
    await note("destroy", api.destroy(made.instance_id))
    numbers = {str(asks[0]): "ASK", str(asks[1]): "ASK", str(made.instance_id): "ID"}
    return {action: [_with_words(one, numbers) for one in requests] for action, requests in sent.items()}


def _with_words(request: Request, numbers: Mapping[str, str]) -> Request:
    parts = [numbers.get(part, part) for part in request.path.split("/")]
    return Request(**{**vars(request), "path": "/".join(parts)})


def flat(method: str, path: str, body: Any, headers: Mapping[str, str]) -> dict[str, Any]:
    """A request as one table of names and values."""
    fields = {"body": ABSENT} if body is None else {"body": "object", **body}
    shown = {f"header {name}": value for name, value in headers.items() if name not in HOP}
    return {"method": method, "path": path, **fields, **shown}


def seen(request: Request) -> dict[str, Any]:
    headers = {name.lower(): value for name, value in request.headers.items()}
    return flat(request.method, request.path, request.json() if request.body else None, headers)


@pytest.mark.parametrize("action", RECORDED)
def test_a_request_is_the_official_clients_but_for_the_listed_differences(ours, action):
    theirs, mine = flat(*RECORDED[action]), seen(ours[action][0])
    different = {
        name: (theirs.get(name, ABSENT), mine.get(name, ABSENT))
        for name in {**theirs, **mine}
        if theirs.get(name, ABSENT) != mine.get(name, ABSENT)
    }
    listed = {what: (old, new) for (where, what), (old, new, _) in DIFFERENCES.items() if where in (action, "every")}
    assert different == listed


def test_an_action_is_one_request(ours):
    assert {action: len(sent) for action, sent in ours.items()} == dict.fromkeys(ours, 1)
    assert set(ours) == set(RECORDED)


def test_every_listed_difference_has_a_reason_and_an_action():
    assert all(why for _, _, why in DIFFERENCES.values())
    assert {where for where, _ in DIFFERENCES} <= {"every", *RECORDED}
