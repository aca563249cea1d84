"""Who gets in: secrets as text and files, and real TLS between contexts."""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import ConfigError
from meshllm.net.identity import Identity, MeshSecret, load_or_make_secret, read_secret, write_secret


@given(st.binary(min_size=32, max_size=32))
def test_secret_survives_its_text_form(value: bytes) -> None:
    text = MeshSecret(value).to_text()
    assert MeshSecret.from_text(f"  {text}\n") == MeshSecret(value)
    assert MeshSecret.from_text(text.upper()) == MeshSecret(value)
    assert len(text.split()) == 1


@given(st.binary(min_size=32, max_size=32), st.integers(6, 61), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_a_mistyped_letter_is_noticed_and_not_repeated(value: bytes, place: int, letter: str) -> None:
    text = MeshSecret(value).to_text()
    wrong = text[:place] + letter + text[place + 1 :]
    if wrong != text:
        with pytest.raises(ConfigError) as caught:
            MeshSecret.from_text(wrong)
        assert wrong[6:20] not in str(caught.value)


@pytest.mark.parametrize("text", ["", "hello", "mesh1-", "mesh1-abc", "mesh1-" + "1" * 56, "\x00" * 100])
def test_what_is_no_secret_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="mesh secret") as caught:
        MeshSecret.from_text(text)
    assert "\n" not in str(caught.value)


def test_secret_never_shows_in_repr() -> None:
    secret = MeshSecret.generate()
    assert secret.to_text()[6:] not in repr(secret)
    assert secret.value.hex() not in f"{secret!r}{secret}"


def test_first_start_makes_a_secret_of_mode_0600_and_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "state" / "mesh-key"
    old = os.umask(0)
    try:
        secret, made = load_or_make_secret(path)
    finally:
        os.umask(old)
    assert made
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_make_secret(path) == (secret, False)
    assert [entry.name for entry in path.parent.iterdir()] == ["mesh-key"]


@pytest.mark.parametrize(("mode", "taken"), [(0o600, True), (0o640, True), (0o644, False), (0o602, False)])
def test_a_secret_that_every_user_may_read_is_refused_with_the_cure(tmp_path: Path, mode: int, taken: bool) -> None:
    path = tmp_path / "mesh-key"
    secret, _ = load_or_make_secret(path)
    path.chmod(mode)
    if taken:
        assert read_secret(path) == secret
        return
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        read_secret(path)


def test_a_secret_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "mesh-key"
    first, second = MeshSecret.generate(), MeshSecret.generate()
    write_secret(path, first, replace=False)
    with pytest.raises(FileExistsError):
        write_secret(path, second, replace=False)
    assert read_secret(path) == first
    write_secret(path, second, replace=True)
    assert read_secret(path) == second


def test_a_broken_key_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mesh-key"
    path.write_text("mesh1-nonsense\n")
    with pytest.raises(ConfigError, match=r"mesh-key: the mesh secret"):
        load_or_make_secret(path)


def test_tag_is_public_and_says_nothing_of_the_secret() -> None:
    secret = MeshSecret(bytes(32))
    assert secret.tag == MeshSecret(bytes(32)).tag
    assert len(secret.tag) == 16
    assert secret.tag != MeshSecret(bytes(31) + b"\1").tag


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = server.wrap_bio(to_server, to_client, server_side=True)
    two = client.wrap_bio(to_client, to_server, server_side=False)
    done: set[ssl.SSLObject] = set()
    for _ in range(10):
        for side in (two, one):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                pass
        if len(done) == 2:
            break
    return one, two


def test_members_of_one_mesh_meet_over_tls_1_3() -> None:
    secret = MeshSecret.generate()
    one, two = _handshake(Identity.create(secret, "a").server, Identity.create(secret, "b").client)
    assert one.version() == two.version() == "TLSv1.3"
    assert one.getpeercert(True) is not None


def test_another_secret_is_refused_by_both_sides() -> None:
    ours, theirs = Identity.create(MeshSecret.generate(), "a"), Identity.create(MeshSecret.generate(), "b")
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(ours.server, theirs.client)
    theirs.client.verify_mode = ssl.CERT_NONE  # an attacker who does not check
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(ours.server, theirs.client)


def test_a_client_without_a_certificate_is_refused() -> None:
    ours = Identity.create(MeshSecret.generate(), "a")
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname = False
    nobody.verify_mode = ssl.CERT_NONE
    with pytest.raises(ssl.SSLError, match=r"PEER_DID_NOT_RETURN_A_CERTIFICATE|peer did not return"):
        _handshake(ours.server, nobody)
