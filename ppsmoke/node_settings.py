"""What a stage node is told by its environment, read once and checked; the secrets are taken out of it on the way."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

from ppsmoke.cluster.addresses import Candidate, is_node_id
from ppsmoke.cluster.identity import Identity
from ppsmoke.errors import InputError, LinkError
from ppsmoke.keys import KEY_BYTES
from ppsmoke.pipeline.names import stage_role
from ppsmoke.worker.start import DEFAULT_TARGET

PREFIX = "PPSMOKE_NODE_"
SECRETS = (f"{PREFIX}LEAF_KEY", f"{PREFIX}CLUSTER_KEY", "CONTAINER_API_KEY")
FOR_WORKER = (f"{PREFIX}MAX_CONTEXT", f"{PREFIX}WIRE_DTYPE", f"{PREFIX}DEVICE")
DEFAULT_LIFETIME_S = 3600.0
MAX_CERTS_BYTES = 64 << 10
_HOST_PORT = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})")


@dataclass(frozen=True)
class Seed:
    """SEED_ADDR: who the orchestrator is, and where it may be dialled; without an address it dials us."""

    node_id: str
    addresses: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str, *, variable: str = "SEED_ADDR") -> Seed:
        """Raises InputError for anything but `<node id>[@host:port[,host:port...]]`."""
        node_id, _, where = text.partition("@")
        if not is_node_id(node_id):
            raise InputError(f"{variable} is {text[:80]!r}, not <node id>[@host:port,...]")
        return cls(node_id, tuple(_host_port(variable, part) for part in where.split(",") if part))


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """A stage node's task. lifetime_s counts from the start; lifeline: end when stdin does; worker: what it serves.
    advertise: where it can be reached from outside; heartbeat: a file to touch while it hears its run, or "".
    peers: nodes to dial besides the orchestrator: a stage that cannot be dialled must know one that can, if the
    orchestrator cannot be dialled either."""

    stage: int
    num_stages: int
    model: str
    seed: Seed
    peers: tuple[Seed, ...]
    run_id: str
    identity: Identity
    cluster_key: bytes = field(repr=False)
    generation: int
    lifetime_s: float
    tcp: tuple[str, int]
    udp: tuple[str, int] | None
    lifeline: bool
    advertise: tuple[Candidate, ...]
    heartbeat: str
    worker: str
    worker_environment: Mapping[str, str] = field(repr=False)

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> NodeSettings:
        """Raises InputError naming the variable. The secrets are removed from `environment`: no child needs them."""
        secrets = {name: environment.pop(name, "") for name in SECRETS}
        num_stages = _integer(environment, "NUM_STAGES", None, low=1, high=1000)
        stage = _integer(environment, "STAGE", None, low=0, high=num_stages - 1)
        tcp, udp = _listen(environment.get(f"{PREFIX}LISTEN") or "127.0.0.1:0,127.0.0.1:0")
        lifeline = environment.get(f"{PREFIX}LIFELINE", "")
        if lifeline not in ("", "stdin"):
            raise InputError(f"{PREFIX}LIFELINE is {lifeline[:20]!r}, not stdin")
        return cls(
            stage=stage,
            num_stages=num_stages,
            model=_text(environment, "MODEL"),
            seed=Seed.parse(_text(environment, "SEED_ADDR")),
            peers=_peers(environment.get(f"{PREFIX}PEERS", "")),
            run_id=environment.get(f"{PREFIX}RUN_ID", ""),
            identity=_identity(environment, secrets[f"{PREFIX}LEAF_KEY"], role=stage_role(stage, num_stages)),
            cluster_key=_key(f"{PREFIX}CLUSTER_KEY", secrets[f"{PREFIX}CLUSTER_KEY"]),
            generation=_integer(environment, f"{PREFIX}GENERATION", 0, low=0, high=1 << 20),
            lifetime_s=_seconds(environment, f"{PREFIX}LIFETIME_S", DEFAULT_LIFETIME_S),
            tcp=tcp,
            udp=udp,
            lifeline=bool(lifeline),
            advertise=mapped(environment, tcp, udp),
            heartbeat=environment.get(f"{PREFIX}HEARTBEAT", ""),
            worker=environment.get(f"{PREFIX}WORKER") or DEFAULT_TARGET,
            worker_environment=_for_worker(environment),
        )


def _for_worker(environment: Mapping[str, str]) -> dict[str, str]:
    """The node's own environment without what is the node's alone."""
    return {
        name: value
        for name, value in environment.items()
        if name in FOR_WORKER or not (name.startswith(PREFIX) or name in (*SECRETS, "SEED_ADDR"))
    }


def mapped(environment: Mapping[str, str], tcp: tuple[str, int], udp: tuple[str, int] | None) -> tuple[Candidate, ...]:
    """The public address and ports that vast.ai tells a container of; () where it tells nothing usable."""
    host = environment.get("PUBLIC_IPADDR", "").strip()
    outside = _port(environment.get(f"VAST_TCP_PORT_{tcp[1]}", ""))
    if not host or outside is None:
        return ()
    outside_udp = _port(environment.get(f"VAST_UDP_PORT_{udp[1]}", "")) if udp is not None else None
    return (Candidate("mapped", host, outside, outside_udp),)


def _port(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and 0 < int(text[:6]) < 65536 else None


def _text(environment: Mapping[str, str], name: str) -> str:
    if not (value := environment.get(name, "")):
        raise InputError(f"{name} is not set", hint="a stage node is started by a run, not by hand")
    return value


def _integer(environment: Mapping[str, str], name: str, default: int | None, *, low: int, high: int) -> int:
    if name not in environment and default is not None:
        return default
    text = _text(environment, name)
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and low <= int(text) <= high):
        raise InputError(f"{name} is {text[:20]!r}, not a number from {low} to {high}")
    return int(text)


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    try:
        seconds = float(environment.get(name) or default)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise InputError(f"{name} is {environment.get(name, '')[:20]!r}, not a number of seconds")
    return seconds


def _key(name: str, text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise InputError(f"{name} is not {KEY_BYTES} bytes in hex")  # its value is nobody's business
    return key


def _identity(environment: Mapping[str, str], leaf_key: str, *, role: str) -> Identity:
    path = _text(environment, f"{PREFIX}CERTS")
    try:
        with open(path, "rb") as file:
            certificates = json.loads(file.read(MAX_CERTS_BYTES))
        ca_der, leaf_der = (base64.b64decode(certificates[name], validate=True) for name in ("ca", "leaf"))
    except OSError as error:
        raise InputError(f"{PREFIX}CERTS: {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{PREFIX}CERTS: {path} does not hold the two certificates") from error
    try:
        identity = Identity.from_parts(ca_der=ca_der, leaf_der=leaf_der, leaf_key=_key(f"{PREFIX}LEAF_KEY", leaf_key))
    except LinkError as error:
        raise InputError(f"{PREFIX}CERTS: {error.cause}") from error
    if identity.role != role:
        raise InputError(f"{PREFIX}CERTS: a certificate for {identity.role}, while STAGE and NUM_STAGES say {role}")
    return identity


def _listen(text: str) -> tuple[tuple[str, int], tuple[str, int] | None]:
    """ "host:tcp[,host:udp]"; without the second, membership goes over the links alone."""
    parts = text.split(",")
    if len(parts) > 2:
        raise InputError(f"{PREFIX}LISTEN is {text[:80]!r}, not host:tcp,host:udp")
    sockets = [_host_port(f"{PREFIX}LISTEN", part) for part in parts]
    return sockets[0], sockets[1] if len(sockets) == 2 else None


def _peers(text: str) -> tuple[Seed, ...]:
    """ "<node id>@host:port[,host:port...]", several with spaces between."""
    return tuple(Seed.parse(part, variable=f"{PREFIX}PEERS") for part in text.split())


def _host_port(name: str, text: str) -> tuple[str, int]:
    match = _HOST_PORT.fullmatch(text)
    if match is None or int(match[3]) > 65535:
        raise InputError(f"{name}: {text[:80]!r} is not host:port")
    return match[1] or match[2], int(match[3])
