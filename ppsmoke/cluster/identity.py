"""Who a node is: a key and a certificate under its run's CA, and the TLS contexts that prove and demand them.

The orchestrator alone can mint. A node id is the hash of the node's public key; the certificate binds it to a role.
"""

from __future__ import annotations

import hashlib
import os
import ssl
import tempfile
from dataclasses import dataclass, field

from ppsmoke.cluster import p256
from ppsmoke.cluster.certificate import mint_ca, mint_leaf, pem, private_key_der, read_leaf
from ppsmoke.errors import LinkError
from ppsmoke.keys import derive

ALPN = "ppsmoke/1"
NODE_ID_BYTES = 8


def node_id_of(public_key: bytes) -> str:
    """16 hex digits: the first 8 bytes of SHA-256 over the 65-byte public key."""
    return hashlib.sha256(public_key).digest()[:NODE_ID_BYTES].hex()


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A node's proof of itself. role is "orchestrator" or "stage-0-of-2"; leaf_key the 32-byte private scalar."""

    node_id: str
    role: str
    ca_der: bytes = field(repr=False)
    leaf_der: bytes = field(repr=False)
    leaf_key: bytes = field(repr=False)

    @classmethod
    def from_parts(cls, *, ca_der: bytes, leaf_der: bytes, leaf_key: bytes) -> Identity:
        """From what a node is handed at its start. Raises LinkError if key and certificate do not belong together."""
        peer = PeerIdentity.read(leaf_der)
        if len(leaf_key) != p256.SCALAR_BYTES or not 0 < int.from_bytes(leaf_key, "big") < p256.ORDER:
            raise LinkError("the leaf key is no P-256 key")
        if p256.public_point(int.from_bytes(leaf_key, "big")) != read_leaf(leaf_der).public_key:
            raise LinkError(f"the leaf key does not belong to the certificate of {peer.role}")
        return cls(node_id=peer.node_id, role=peer.role, ca_der=ca_der, leaf_der=leaf_der, leaf_key=leaf_key)

    def tls_context(self, *, side: str) -> ssl.SSLContext:
        """A context for side "server" or "client": TLS 1.3 alone, both sides prove a leaf of this run's CA."""
        server = side == "server"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # a peer is its key, whatever address it answers from
        context.verify_mode = ssl.CERT_REQUIRED  # a server's default is none: then anybody could come in
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_verify_locations(cadata=self.ca_der)
        if server:
            context.num_tickets = 0  # a resumed session would skip the certificates
        context.set_alpn_protocols([ALPN])
        self._load_chain(context)
        return context

    def _load_chain(self, context: ssl.SSLContext) -> None:
        """ssl takes a key from a path alone: on Linux that of a file in memory, which leaves no trace even if we are
        killed right here; elsewhere a file that only this user can read, gone before this returns."""
        text = pem("CERTIFICATE", self.leaf_der)
        text += pem("EC PRIVATE KEY", private_key_der(int.from_bytes(self.leaf_key, "big")))
        in_memory = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
        if in_memory:
            with open(os.memfd_create("ppsmoke"), "w") as file:
                file.write(text)
                file.flush()
                context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
            return
        handle, path = tempfile.mkstemp(prefix="ppsmoke-")  # mode 0600
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            context.load_cert_chain(path)
        finally:
            os.unlink(path)


@dataclass(frozen=True)
class PeerIdentity:
    """What a peer has proven by its certificate."""

    node_id: str
    role: str
    generation: int

    @classmethod
    def shown(cls, tls: ssl.SSLObject) -> PeerIdentity:
        """Who is at the other end of a handshake that is over: OpenSSL has verified the chain. Raises LinkError."""
        der = tls.getpeercert(binary_form=True)
        if not der:
            raise LinkError("the peer has shown no certificate", reason="no-certificate")
        if tls.selected_alpn_protocol() != ALPN:
            raise LinkError("the peer did not agree on the protocol inside TLS", reason="tls")
        return cls.read(der)

    @classmethod
    def read(cls, leaf_der: bytes) -> PeerIdentity:
        """Raises LinkError if these bytes are no leaf of ours. Whether the run's CA signed it is TLS's business."""
        names = read_leaf(leaf_der)
        return cls(node_id_of(names.public_key), names.role, names.generation)


class RunAuthority:
    """The run's CA. It lives where the run key lives, on the orchestrator, and nowhere else."""

    def __init__(self, run_key: bytes) -> None:
        self._run_key = run_key
        self._scalar = p256.scalar_from(derive(run_key, "ca", 48))
        self.ca_der = mint_ca(self._scalar)

    def mint(self, role: str, generation: int = 0) -> Identity:
        """The identity of a role's holder; a replaced host's successor is a new generation with a new key.
        The same run key, role and generation give the same bytes."""
        scalar = p256.scalar_from(derive(self._run_key, f"leaf {role} {generation}", 48))
        public_key = p256.public_point(scalar)
        return Identity(
            node_id=node_id_of(public_key),
            role=role,
            ca_der=self.ca_der,
            leaf_der=mint_leaf(public_key, role=role, generation=generation, ca_scalar=self._scalar),
            leaf_key=scalar.to_bytes(p256.SCALAR_BYTES, "big"),
        )
