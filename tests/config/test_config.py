"""Where a setting comes from, and what a wrong one is answered: one line that names its place."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.addresses import split_address
from meshllm.config import Config, client_sockets, load_config, parse_toml
from meshllm.errors import ConfigError
from meshllm.settings import SETTINGS, read_bytes

EXAMPLE = Path(__file__).parents[2] / "config" / "meshllm.toml"
HOME = {"HOME": "/home/ann"}


def load(tmp_path: Path, toml: str = "", environment: dict[str, str] | None = None, **flags: str) -> Config:
    file = tmp_path / "meshllm.toml"
    file.write_text(toml, "utf-8")
    return load_config(flags, {**HOME, **(environment or {})}, config_file=file, uid=1000)


def test_flags_win_over_variables_over_the_file(tmp_path: Path) -> None:
    toml = 'context = 100\nslots = 2\nname = "file"\n'
    environment = {"MESHLLM_CONTEXT": "200", "MESHLLM_SLOTS": "3"}
    config = load(tmp_path, toml, environment, context="300")
    assert (config.context, config.slots, config.name, config.exchange) == (300, 3, "file", "f16")


def test_each_setting_is_a_field_and_has_its_own_flag_and_variable() -> None:
    assert [setting.name for setting in SETTINGS] == [field.name for field in dataclasses.fields(Config)]
    assert len({setting.option for setting in SETTINGS}) == len({s.variable for s in SETTINGS}) == len(SETTINGS)


def test_the_example_file_holds_every_key_with_its_default(tmp_path: Path) -> None:
    text = EXAMPLE.read_text("utf-8")
    defaults = load_config({}, HOME, uid=1000, config_file=None)
    given_values = parse_toml(text, "meshllm.toml")
    for name, value in given_values.items():
        assert value == getattr(defaults, name), name
    everything = parse_toml(re.sub(r"(?m)^# (\w+ = )", r"\1", text), "meshllm.toml")
    assert sorted(everything) == sorted(setting.name for setting in SETTINGS)
    system = load_config({}, {}, uid=0)
    assert {name: everything[name] for name in ("state_dir", "key_file", "socket", "socket_mode")} == {
        "state_dir": system.state_dir,
        "key_file": system.key_file,
        "socket": system.socket,
        "socket_mode": system.socket_mode,
    }


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("contxt = 5", 'meshllm.toml:1: contxt: unknown key; did you mean "context"?'),
        ('\n\nlog-format = "json"', 'meshllm.toml:3: log-format: unknown key; did you mean "log_format"?'),
        ("zzz = 1", "meshllm.toml:1: zzz: unknown key"),
        ("# x\nslots = 2\ncontext = true", "meshllm.toml:3: context: expected a whole number, found true"),
        ('context = "many"', 'meshllm.toml:1: context: expected a whole number, found "many"'),
        ("port = 70000", "meshllm.toml:1: port: expected 1 to 65535, found 70000"),
        ("peers = 5", "meshllm.toml:1: peers: expected a list of texts"),
        ("peers = [5]", "meshllm.toml:1: peers: expected a list of texts"),
        ('peers = ["[::1"]', "meshllm.toml:1: peers:"),
        ('interfaces = ["eth 0"]', "meshllm.toml:1: interfaces: expected patterns"),
        ('memory = "6 potatoes"', "meshllm.toml:1: memory: expected bytes, like"),
        ('layout = "some"', 'meshllm.toml:1: layout: expected "auto", "all" or a number of ranks'),
        ('exchange = "f64"', 'meshllm.toml:1: exchange: expected "q8_0", "f16", "f32"'),
        ('socket_mode = "0999"', "meshllm.toml:1: socket_mode: expected an octal mode"),
        ('tcp = "8080"', "meshllm.toml:1: tcp:"),
        ("[daemon]\nslots = 2", "meshllm.toml:1: daemon: unknown table"),
        ("\nslots = ", 'meshllm.toml:2: Invalid value, found "slots ="'),
        ("slots = 2\nslots = 3", "meshllm.toml"),
        ('name = "a\\nb"', "meshllm.toml:1: name: expected at most 200 bytes of printable text"),
    ],
)
def test_a_wrong_file_is_one_line_with_file_line_and_key(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, toml)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_variables_and_flags_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'^MESHLLM_SLOTS: expected 1 to 64, found "0"$'):
        load(tmp_path, environment={"MESHLLM_SLOTS": "0"})
    with pytest.raises(
        ConfigError, match=r'^--layout: expected "auto", "all" or a number of ranks, 1 to 64, found "x"$'
    ):
        load(tmp_path, layout="x")
    with pytest.raises(ConfigError, match=r'^MESHLLM_CONTXT: unknown variable; did you mean "MESHLLM_CONTEXT"\?$'):
        load(tmp_path, environment={"MESHLLM_CONTXT": "5"})
    load(tmp_path, environment={"MESHLLM_TEST_MODELS": "/x", "MESHLLM_SHARED": "/y"})  # not settings


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("MESHLLM_SOKCET", "MESHLLM_SOCKET"), ("MESHLLM_CONFG", "MESHLLM_CONFIG"), ("MESHLLM_PEER", "MESHLLM_PEERS"),
        ("meshllm_socket", "MESHLLM_SOCKET"), ("MESHLLMSOCKET", "MESHLLM_SOCKET"),
    ],
)  # fmt: skip
def test_a_variable_one_slip_away_is_refused_by_what_reads_it(tmp_path: Path, slip: str, meant: str) -> None:
    message = f'^{slip}: unknown variable; did you mean "{meant}"\\?$'
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, environment={slip: "x"})
    with pytest.raises(ConfigError, match=message):
        client_sockets({**HOME, slip: "x"}, uid=1000)


def test_a_file_that_was_asked_for_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_config({}, HOME, config_file=tmp_path / "missing.toml", uid=1000)
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_config({}, {**HOME, "MESHLLM_CONFIG": str(tmp_path / "missing.toml")}, uid=1000)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "meshllm.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"meshllm.toml: is not UTF-8 at byte 0"):
        load_config({}, HOME, config_file=tmp_path / "meshllm.toml", uid=1000)


def test_places_of_a_user_and_of_the_system() -> None:
    user = load_config({}, {**HOME, "XDG_RUNTIME_DIR": "/run/user/1000"}, uid=1000)
    assert str(user.state_dir) == "/home/ann/.local/state/meshllm"
    assert str(user.socket) == "/run/user/1000/meshllm/meshllm.sock"
    assert user.socket_mode == 0o600
    without_runtime = load_config({}, HOME, uid=1000)
    assert str(without_runtime.socket) == "/home/ann/.local/state/meshllm/meshllm.sock"
    system = load_config({}, {}, uid=0)
    assert (str(system.state_dir), str(system.socket)) == ("/var/lib/meshllm", "/run/meshllm/meshllm.sock")
    assert system.socket_mode == 0o660
    service = {"STATE_DIRECTORY": "/var/lib/meshllm", "RUNTIME_DIRECTORY": "/run/meshllm"}
    assert load_config({}, service, uid=990) == system


def test_a_second_daemon_keeps_all_it_has_in_its_own_folder() -> None:
    config = load_config({"state_dir": "/srv/two"}, HOME, uid=1000)
    assert (str(config.socket), str(config.key_file)) == ("/srv/two/meshllm.sock", "/srv/two/mesh-key")


def test_the_secret_may_be_a_systemd_credential(tmp_path: Path) -> None:
    (tmp_path / "mesh-key").write_text("x")
    assert load_config({}, {"CREDENTIALS_DIRECTORY": str(tmp_path)}, uid=0).key_file == tmp_path / "mesh-key"
    assert str(load_config({}, {"CREDENTIALS_DIRECTORY": "/nowhere"}, uid=0).key_file) == "/var/lib/meshllm/mesh-key"


def test_commands_find_the_daemon_of_the_user_and_of_the_system_sock_03() -> None:
    found = client_sockets({**HOME, "XDG_RUNTIME_DIR": "/run/user/1000"}, uid=1000)
    assert [str(path) for path in found] == ["/run/user/1000/meshllm/meshllm.sock", "/run/meshllm/meshllm.sock"]
    assert [str(path) for path in client_sockets({"MESHLLM_SOCKET": "/x.sock"}, uid=1000)] == ["/x.sock"]
    assert [str(path) for path in client_sockets({"MESHLLM_STATE_DIR": "/srv/two"}, uid=0)] == ["/srv/two/meshllm.sock"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.1", ("10.0.0.1", 6374)),
        ("host.lan:99", ("host.lan", 99)),
        ("[fe80::1%eth0]:99", ("fe80::1%eth0", 99)),
        ("[::1]", ("::1", 6374)),
        ("::1", ("::1", 6374)),
        ("fe80::1%eth0", ("fe80::1%eth0", 6374)),
        ("::ffff:1.2.3.4", ("::ffff:1.2.3.4", 6374)),
        ("a_b-c.lan.:1", ("a_b-c.lan.", 1)),
        ("bücher.lan", ("bücher.lan", 6374)),
    ],
)
def test_addresses_of_peers(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text, default_port=6374) == expected


@pytest.mark.parametrize(
    "text",
    [
        "a:b:c", "a:b", "1:2:3", "[::1]x", "[::1", "[host]:5", "[1.2.3.4]:5", "[::1%]:5", "host:", ":80", "a b", "a..b",
        "http://x", "a/b", "-", "-a", "x:0", "x:65536", "x:-1", "x:٣", "10.0.0.300", "1.2.3", "8080", "x" * 64, "",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_with_the_value_and_the_form(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"peers": ("good.lan", text or "[]")}, HOME, uid=1000)
    assert re.fullmatch(
        f"--peer: expected (host, host:port or \\[IPv6\\]:port|a port, 1 to 65535, after the colon), "
        f'found "{re.escape(text or "[]")[:56]}.*"',
        str(caught.value),
    )
    with pytest.raises(ConfigError, match=r"^--tcp: expected "):
        load(tmp_path, tcp=text or "[]")


def test_an_empty_address_is_refused_but_an_empty_variable_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'^--peer: expected text, found ""$'):
        load_config({"peers": ("",)}, HOME, uid=1000)
    with pytest.raises(ConfigError, match=r"meshllm.toml:1: interfaces: expected text"):
        load(tmp_path, 'interfaces = [""]')
    assert load(tmp_path, environment={"MESHLLM_PEERS": ""}).peers == ()


def test_the_port_of_tcp_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'^--tcp: expected host:port or \[IPv6\]:port, found "10.0.0.1"$'):
        load(tmp_path, tcp="10.0.0.1")


@pytest.mark.parametrize(("text", "size"), [("6G", 6 << 30), ("512m", 512 << 20), ("1.5GiB", 3 << 29), ("auto", None)])
def test_sizes_of_memory(text: str, size: int | None) -> None:
    assert read_bytes(text) == size


@given(st.text(max_size=200))
def test_no_file_raises_anything_else(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse_toml(text, "x.toml")
