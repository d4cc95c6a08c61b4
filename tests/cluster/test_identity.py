from __future__ import annotations

import os
import shutil
import ssl
import stat
import subprocess
import tempfile

import pytest

from ppsmoke.cluster.certificate import mint_leaf, pem, read_leaf
from ppsmoke.cluster.identity import ALPN, Identity, PeerIdentity, RunAuthority
from ppsmoke.errors import LinkError

AUTHORITY = RunAuthority(b"r" * 32)
STAGE_0 = AUTHORITY.mint("stage-0-of-2")
STAGE_1 = AUTHORITY.mint("stage-1-of-2")
STRANGERS = RunAuthority(b"s" * 32)


def test_the_same_run_mints_the_same_bytes_and_another_run_or_generation_does_not():
    assert RunAuthority(b"r" * 32).mint("stage-0-of-2") == STAGE_0
    others = [STRANGERS.mint("stage-0-of-2"), AUTHORITY.mint("stage-0-of-2", 1), STAGE_1]
    assert len({identity.node_id for identity in [STAGE_0, *others]}) == 4


def test_a_leaf_says_whose_key_role_and_generation_it_is():
    replaced = AUTHORITY.mint("stage-0-of-2", 3)
    assert PeerIdentity.read(replaced.leaf_der) == PeerIdentity(replaced.node_id, "stage-0-of-2", 3)


def test_an_identity_survives_being_handed_over_in_parts_but_not_with_the_wrong_key():
    parts = {"ca_der": STAGE_0.ca_der, "leaf_der": STAGE_0.leaf_der}
    assert Identity.from_parts(**parts, leaf_key=STAGE_0.leaf_key) == STAGE_0
    for wrong in (STAGE_1.leaf_key, b"", bytes(32), b"\xff" * 32):
        with pytest.raises(LinkError, match="leaf key"):
            Identity.from_parts(**parts, leaf_key=wrong)


def test_no_key_shows_in_a_repr():
    assert STAGE_0.leaf_key.hex() not in repr(STAGE_0)
    assert repr(STAGE_0) == f"Identity(node_id='{STAGE_0.node_id}', role='stage-0-of-2')"


@pytest.mark.parametrize("der", [b"", b"\x30", b"\x30\x82\xff\xff", os.urandom(64), AUTHORITY.ca_der], ids=range(5))
def test_what_is_no_leaf_of_ours_is_refused(der):
    with pytest.raises(LinkError, match="no ppsmoke run"):
        PeerIdentity.read(der)


@pytest.mark.parametrize("cut", range(0, len(STAGE_0.leaf_der), 7))
def test_a_leaf_cut_anywhere_is_refused(cut):
    with pytest.raises(LinkError):
        PeerIdentity.read(STAGE_0.leaf_der[:cut])


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_openssl_finds_nothing_wrong_with_the_chain_in_strict_mode(tmp_path):
    (tmp_path / "ca.pem").write_text(pem("CERTIFICATE", AUTHORITY.ca_der))
    (tmp_path / "leaf.pem").write_text(pem("CERTIFICATE", STAGE_0.leaf_der))
    command = ["openssl", "verify", "-x509_strict", "-check_ss_sig", "-CAfile", "ca.pem", "leaf.pem"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert done.stdout == "leaf.pem: OK\n", done.stderr


@pytest.mark.parametrize("in_memory", [True, False])
def test_the_key_file_is_private_while_it_exists_and_gone_afterwards(in_memory, monkeypatch, tmp_path):
    seen = []
    if not in_memory:  # as on macOS
        monkeypatch.delattr(os, "memfd_create", raising=False)
    elif not hasattr(os, "memfd_create"):
        pytest.skip("this system has no files in memory")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    load = ssl.SSLContext.load_cert_chain

    def watched(context, path):
        assert path.startswith(("/proc/self/fd/", str(tmp_path)))
        seen.append((path.startswith("/proc/"), stat.S_IMODE(os.stat(path).st_mode) & 0o077))
        load(context, path)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", watched)
    STAGE_0.tls_context(side="server")
    # A file in memory has no name that another user could open: its mode does not matter.
    assert seen == [(True, seen[0][1])] if in_memory else seen == [(False, 0)]
    assert not list(tmp_path.iterdir())


def handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both sides in memory, until neither has anything to say. Raises what the server or the client raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (one, other):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return one, other


def bare_context(side: str, identity: Identity | None, *, trusts: bytes) -> ssl.SSLContext:
    """What an attacker may run: any certificate or none, no checks of its own beyond those that it needs."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if side == "client" else ssl.PROTOCOL_TLS_SERVER)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_verify_locations(cadata=trusts)
    context.set_alpn_protocols([ALPN])
    if identity is not None:
        identity._load_chain(context)
    return context


def forged(role: str) -> Identity:
    """stage 1 signs itself a certificate for another role with its own key as if that were the CA's."""
    own_scalar = int.from_bytes(STAGE_1.leaf_key, "big")
    leaf = mint_leaf(read_leaf(STAGE_1.leaf_der).public_key, role=role, generation=0, ca_scalar=own_scalar)
    return Identity(node_id=STAGE_1.node_id, role=role, ca_der=STAGE_1.ca_der, leaf_der=leaf, leaf_key=STAGE_1.leaf_key)


def test_two_members_of_a_run_shake_hands_by_tls_1_3_without_tickets():
    client, server = handshake(STAGE_0.tls_context(side="client"), STAGE_1.tls_context(side="server"))
    assert (client.version(), server.selected_alpn_protocol()) == ("TLSv1.3", ALPN)
    assert PeerIdentity.read(server.getpeercert(binary_form=True)).role == "stage-0-of-2"
    assert client.session is None or not client.session.has_ticket


@pytest.mark.parametrize(
    ("impostor", "what"),
    [
        (STRANGERS.mint("stage-0-of-2"), "another run's key"),
        (None, "no certificate"),
        (forged("orchestrator"), "a stage that signs itself the orchestrator"),
        (forged("stage-0-of-2"), "a stage that signs itself another stage"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_server_refuses_in_the_handshake(impostor, what):
    client = bare_context("client", impostor, trusts=AUTHORITY.ca_der)
    with pytest.raises(ssl.SSLError):
        handshake(client, STAGE_1.tls_context(side="server"))


@pytest.mark.parametrize("impostor", [STRANGERS.mint("stage-0-of-2"), forged("orchestrator"), forged("stage-0-of-2")])
def test_a_client_refuses_in_the_handshake(impostor):
    server = bare_context("server", impostor, trusts=AUTHORITY.ca_der)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(STAGE_0.tls_context(side="client"), server)


def test_an_older_tls_is_refused():
    old = bare_context("client", STAGE_0, trusts=AUTHORITY.ca_der)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        handshake(old, STAGE_1.tls_context(side="server"))
