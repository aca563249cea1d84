"""Who belongs to the mesh: one 32-byte secret, from it a certificate authority, from that a certificate for each start.

secret --HKDF-SHA256--> Ed25519 CA key (never leaves this file) and the public tag shown in mDNS. Every link is TLS 1.3
with both sides verified against that CA. A shared secret proves membership, not identity: the node id comes in Hello.
With TLS 1.3 a client of another secret sees its own handshake succeed: a peer has joined only once its first message
has come.

The certificate of the CA is the same bytes on every device. Certificates never expire (1950 to 9999): boards without a
clock start in 1970.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import os
import secrets
import ssl
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from meshllm.errors import ConfigError

SECRET_BYTES = 32
_PREFIX = "mesh1-"
_CHECK_BYTES = 3  # 35 bytes are 56 letters of base32 without padding
_NOT_BEFORE = datetime.datetime(1950, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)  # RFC 5280, 4.1.2.5: no expiry


@dataclass(frozen=True, slots=True, repr=False)
class MeshSecret:
    """The secret that makes a mesh. Its repr and str never show it."""

    value: bytes

    def __post_init__(self) -> None:
        if len(self.value) != SECRET_BYTES:
            raise ValueError(f"a mesh secret has {SECRET_BYTES} bytes")

    def __repr__(self) -> str:
        return f"MeshSecret(tag={self.tag})"

    @staticmethod
    def generate() -> MeshSecret:
        """A new secret from the system's random source."""
        return MeshSecret(secrets.token_bytes(SECRET_BYTES))

    @property
    def tag(self) -> str:
        """16 hex digits that name the mesh in public and say nothing of the secret."""
        return _derive(self.value, b"meshllm tag v1", 8).hex()

    def to_text(self) -> str:
        """One line to carry to another device: mesh1- and 56 letters and digits, the last ones a checksum."""
        return _PREFIX + base64.b32encode(self.value + _checksum(self.value)).decode("ascii").lower()

    @staticmethod
    def from_text(text: str) -> MeshSecret:
        """The secret of a line of `meshllm key show`. Raises ConfigError, which does not repeat the text."""
        line = text.strip()
        if not line.lower().startswith(_PREFIX):
            raise ConfigError(
                f'the mesh secret does not start with "{_PREFIX}"; copy the whole line that "meshllm key show" prints'
            )
        try:
            raw = base64.b32decode(line[len(_PREFIX) :].upper())
        except (binascii.Error, ValueError):
            raise ConfigError(
                'the mesh secret has a wrong letter or length; copy the whole line of "meshllm key show"'
            ) from None
        value, check = raw[:SECRET_BYTES], raw[SECRET_BYTES:]
        if len(value) != SECRET_BYTES or check != _checksum(value):
            raise ConfigError(
                'the mesh secret is mistyped (its checksum is wrong); copy the whole line of "meshllm key show"'
            )
        return MeshSecret(value)


def _checksum(value: bytes) -> bytes:
    return hashlib.sha256(b"meshllm secret v1" + value).digest()[:_CHECK_BYTES]


def _derive(secret: bytes, info: bytes, size: int) -> bytes:
    return HKDF(algorithm=hashes.SHA256(), length=size, salt=None, info=info).derive(secret)


def read_secret(path: Path) -> MeshSecret:
    """The secret in a file of one line. Raises ConfigError that names the file; FileNotFoundError if there is none."""
    try:
        with path.open("rb") as file:
            is_open = bool(os.fstat(file.fileno()).st_mode & stat.S_IRWXO)
            text = file.read(4096).decode("ascii", "replace")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: the mesh secret cannot be read: {error.strerror}") from None
    try:
        secret = MeshSecret.from_text(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if is_open:
        raise ConfigError(f"{path}: the mesh secret is open to all users of this device; run: chmod 600 {path}")
    return secret


def write_secret(path: Path, secret: MeshSecret, *, replace: bool) -> None:
    """Writes the secret to a file of mode 0600, whole or not at all. FileExistsError if it is there and replace is
    false.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".mesh-key-")  # mode 0600 from its first moment
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secret.to_text().encode("ascii") + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(name, path)
        else:
            os.link(name, path)  # fails if the file has come meanwhile: two starts agree on one secret
            os.unlink(name)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load_or_make_secret(path: Path) -> tuple[MeshSecret, bool]:
    """The secret in a file, and whether it had to be made. Raises ConfigError."""
    try:
        return read_secret(path), False
    except FileNotFoundError:
        pass
    try:
        secret = MeshSecret.generate()
        write_secret(path, secret, replace=False)
    except FileExistsError:
        return read_secret(path), False
    except OSError as error:
        raise ConfigError(
            f"{path}: the mesh secret cannot be written: {error.strerror}; set key_file or state_dir"
        ) from None
    return secret, True


@dataclass(frozen=True, slots=True, repr=False)
class Identity:
    """What this start presents to peers: TLS contexts for both sides of a link, and the mesh's public tag."""

    tag: str
    server: ssl.SSLContext
    client: ssl.SSLContext
    certificate: bytes  # DER of this start's: whoever presents it is this daemon itself

    @staticmethod
    def create(secret: MeshSecret, node: str) -> Identity:
        """Issues a certificate for this start; about a millisecond. node: the certificate's name, for debugging
        only.
        """
        ca_key = Ed25519PrivateKey.from_private_bytes(_derive(secret.value, b"meshllm certificate authority v1", 32))
        ca = _ca_certificate(ca_key, secret.tag)
        key = Ed25519PrivateKey.generate()
        leaf = _leaf_certificate(ca_key, ca, key, node)
        chain = leaf.public_bytes(Encoding.PEM) + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        anchor = ca.public_bytes(Encoding.PEM).decode("ascii")
        server = _context(ssl.PROTOCOL_TLS_SERVER, anchor, chain)
        client = _context(ssl.PROTOCOL_TLS_CLIENT, anchor, chain)
        return Identity(secret.tag, server, client, leaf.public_bytes(Encoding.DER))


def _ca_certificate(key: Ed25519PrivateKey, tag: str) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"meshllm {tag}")])
    return (
        x509.CertificateBuilder(name, name, key.public_key(), 1, _NOT_BEFORE, _NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, None)
    )


def _leaf_certificate(
    ca_key: Ed25519PrivateKey, ca: x509.Certificate, key: Ed25519PrivateKey, node: str
) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node[:64])])
    return (
        x509.CertificateBuilder(
            ca.subject, name, key.public_key(), x509.random_serial_number(), _NOT_BEFORE, _NOT_AFTER
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, None)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _context(protocol: int, anchor: str, chain: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # peers have addresses, not names; what counts is the CA
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=anchor)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nothing may follow the handshake: a data link leaves TLS after its first messages
    # ssl takes a certificate from a file only. This one is never on a disk: it lives in memory, until closed below.
    handle = os.memfd_create("meshllm-certificate", os.MFD_CLOEXEC)
    try:
        os.write(handle, chain)
        context.load_cert_chain(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)
    return context
