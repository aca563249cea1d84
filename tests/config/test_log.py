"""What gets into a log line and what never does."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import structlog

from meshllm.log import configure_logging


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """What was set up writes to a stream that ends with the test; the tests after it must not."""
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("form", ["json", "console"])
def test_prompts_answers_and_secrets_never_reach_the_log(form: str, capfd: pytest.CaptureFixture[str]) -> None:
    log = configure_logging("json" if form == "json" else "console", "debug")
    for name in ("prompt", "messages", "text", "tokens", "token_ids", "secret", "key", "content"):
        log.info("request_done", **{name: "SENSITIVE"}, n_tokens=5)
    out, err = capfd.readouterr()
    assert out == ""
    assert "SENSITIVE" not in err
    assert err.count("request_done") == 8


def test_json_lines_are_json_with_level_and_time(capfd: pytest.CaptureFixture[str]) -> None:
    log = configure_logging("json", "info")
    log.debug("not_shown")
    log.warning("peer_lost", peer="kitchen", after_s=2.1)
    (line,) = capfd.readouterr().err.splitlines()
    event = json.loads(line)
    assert (event["event"], event["level"], event["peer"], event["after_s"]) == ("peer_lost", "warning", "kitchen", 2.1)
    assert event["timestamp"].endswith("Z")


def test_a_strangers_text_cannot_write_to_the_terminal_disc_11(capfd: pytest.CaptureFixture[str]) -> None:
    log = configure_logging("console", "info")
    log.info("peer_seen", name="Lamp 7\r\n\x1b[31mred", long="x" * 10000)
    err = capfd.readouterr().err
    assert "\x1b[31m" not in err
    assert err.count("\n") == 1
    assert len(err) < 1500
