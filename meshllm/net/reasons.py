"""Why a link ended, in words, from what ssl and the system raise. The one place that says so.

Different secrets are named only where TLS says so: a certificate of another authority, here or by the other end's
alert. A port that is shut, silent or of another program has other cures.
"""

from __future__ import annotations

import os
import socket
import ssl
from typing import Final

# X509_V_ERR_* of OpenSSL: no issuer of that name, a signature that is not its own, self-signed, unverifiable
_FOREIGN: Final = frozenset((2, 7, 18, 19, 20, 21))
_NOT_TLS: Final = frozenset(
    ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "PACKET_LENGTH_TOO_LONG", "BAD_RECORD_TYPE",
     "RECORD_LAYER_FAILURE", "RECORD_TOO_SMALL", "UNKNOWN_PROTOCOL")
)  # fmt: skip


def reason_of(error: BaseException) -> str:
    """One phrase of which the other end is the subject, or what the system said."""
    if isinstance(error, OSError) and error.errno is None and error.__cause__ is not None:
        error = first_of(error.__cause__)  # trio's "all attempts to connect failed"
    match error:
        case ssl.SSLCertVerificationError():
            if error.verify_code in _FOREIGN:
                return "it belongs to another mesh (the secrets differ)"
            return f"its certificate is refused ({error.verify_message})"
        case ssl.SSLError():
            return _of_tls(error.reason or "")
        case socket.gaierror():
            return "its name cannot be looked up now" if error.errno == socket.EAI_AGAIN else "its name is not known"
        case OSError() if error.errno:
            text = os.strerror(error.errno)  # trio's own text repeats the address
            return text[:1].lower() + text[1:]
        case _:
            return str(error) or "connection lost"


def _of_tls(reason: str) -> str:
    words = reason.lower().replace("_", " ")
    if reason.endswith("_ALERT_UNKNOWN_CA"):
        return "it refused our certificate (the secrets differ)"
    if "_ALERT_" in reason:
        return f"it broke off the handshake ({words})"
    if reason == "UNEXPECTED_EOF_WHILE_READING":
        return "it left during the handshake (a peer does where it found a faster way)"
    if reason in _NOT_TLS:
        return f"it speaks something else: not TLS ({words})"
    return f"it does not speak TLS 1.3 as a peer does ({words or 'cut off'})"


def first_of(error: BaseException) -> BaseException:
    """A single error of a group, for its message."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
