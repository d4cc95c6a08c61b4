"""A stage's environment: what of it says where the stage, and others, can be reached."""

from __future__ import annotations

import base64
import json

import pytest

from ppsmoke.cluster.addresses import Candidate
from ppsmoke.cluster.identity import RunAuthority
from ppsmoke.errors import InputError
from ppsmoke.node_settings import NodeSettings, Seed

NODE = "00112233445566aa"


def read(folder, **more: str) -> NodeSettings:
    identity = RunAuthority(bytes(32)).mint("stage-0-of-1")
    certificates = {"ca": identity.ca_der, "leaf": identity.leaf_der}
    path = folder / "certificates"
    path.write_text(json.dumps({name: base64.b64encode(der).decode() for name, der in certificates.items()}))
    return NodeSettings.from_environment(
        {
            "STAGE": "0",
            "NUM_STAGES": "1",
            "MODEL": "m",
            "SEED_ADDR": NODE,
            "PPSMOKE_NODE_LEAF_KEY": identity.leaf_key.hex(),
            "PPSMOKE_NODE_CLUSTER_KEY": "07" * 32,
            "PPSMOKE_NODE_CERTS": str(path),
            "PPSMOKE_NODE_LISTEN": "0.0.0.0:7070,0.0.0.0:7071",
            **more,
        }
    )


@pytest.mark.parametrize(
    ("variables", "advertised"),
    [
        ({}, ()),
        ({"PUBLIC_IPADDR": "203.0.113.7"}, ()),
        ({"VAST_TCP_PORT_7070": "40001"}, ()),
        ({"PUBLIC_IPADDR": "203.0.113.7", "VAST_TCP_PORT_22": "40001"}, ()),
        (
            {"PUBLIC_IPADDR": "203.0.113.7", "VAST_TCP_PORT_7070": "40001"},
            (Candidate("mapped", "203.0.113.7", 40001, None),),
        ),
        (
            {"PUBLIC_IPADDR": "203.0.113.7", "VAST_TCP_PORT_7070": "40001", "VAST_UDP_PORT_7071": "40002"},
            (Candidate("mapped", "203.0.113.7", 40001, 40002),),
        ),
    ],
)
def test_what_the_provider_has_mapped_to_our_ports_is_advertised(tmp_path, variables, advertised):
    assert read(tmp_path, **variables).advertise == advertised


def test_a_stage_can_be_told_of_nodes_besides_the_orchestrator(tmp_path):
    other = "ffeeddccbbaa9988"
    peers = read(tmp_path, PPSMOKE_NODE_PEERS=f"{NODE}@203.0.113.7:40001 {other}@10.0.0.1:7,[fd00::1]:8").peers
    assert peers == (Seed(NODE, (("203.0.113.7", 40001),)), Seed(other, (("10.0.0.1", 7), ("fd00::1", 8))))
    assert read(tmp_path).peers == ()
    with pytest.raises(InputError, match="PPSMOKE_NODE_PEERS"):
        read(tmp_path, PPSMOKE_NODE_PEERS="nonsense")
