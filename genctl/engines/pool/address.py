"""Whether a Ray cluster answers at an address: Ray itself would wait for minutes, or for ever, and say little.

Ray's head (`HOST:PORT`) and its client server (`ray://HOST:PORT`) speak gRPC. Each has a call that only asks whether it
is there; one such call, with a deadline, tells a cluster from a port that says nothing or speaks something else, and a
token that is missing from one that is wrong.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from genctl.documents import reader
from genctl.documents.reader import Unreadable
from genctl.errors import UsageError

ANSWER_S = 30.0  # until an address that accepts connections and does not answer is given up
CONNECT_S = 10.0  # until one that does not accept is
LONGEST_TOKEN = 1 << 16  # bytes
CLIENT = "ray://"
# The calls, and what is sent: "are you alive?" to a head, "ping" to a client server (ray/protobuf).
_HEAD = ("/ray.rpc.NodeInfoGcsService/CheckAlive", b"")
_CLIENT_SERVER = ("/ray.rpc.RayletDriver/ClusterInfo", b"\x08\x04")


def probe(address: str) -> None:
    """Raises UsageError where no Ray cluster answers at HOST:PORT, within `ANSWER_S`. `auto` is not looked at."""
    host, colon, port = address.removeprefix(CLIENT).rpartition(":")
    if not (colon and port.isdecimal()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise nothing_there(address, getattr(error, "strerror", None) or "no answer") from error
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return  # Ray has the certificates
    try:
        import grpc
    except ImportError:  # Ray without its client
        return
    method, request = _CLIENT_SERVER if address.startswith(CLIENT) else _HEAD
    with grpc.insecure_channel(f"{host}:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(method)(request, timeout=ANSWER_S, metadata=_token())
        except grpc.RpcError as error:
            _judge(address, error, grpc.StatusCode)


def same_place(one: str, other: str) -> bool:
    """Whether two addresses HOST:PORT name the same place."""
    (host, _, port), (there, _, its) = one.rpartition(":"), other.rpartition(":")
    if port != its:
        return False
    try:
        found = [{entry[4][0] for entry in socket.getaddrinfo(name.strip("[]"), None)} for name in (host, there)]
    except (OSError, UnicodeError):
        return host == there
    return bool(found[0] & found[1])


def nothing_there(address: str, reason: str, hint: str = "") -> UsageError:
    """The error of an address at which there is no cluster to join."""
    return UsageError(f"--address {address}: there is no Ray cluster to join: {reason}", hint=hint)


def _judge(address: str, error: Any, codes: Any) -> None:
    """Raises UsageError for an answer that no cluster gives, or that asks for a token."""
    code, details = error.code(), str(error.details())
    if code == codes.UNAUTHENTICATED:
        if _token():
            raise UsageError(f"--address {address}: the cluster does not accept this token", hint=_WHERE)
        raise UsageError(
            f"--address {address}: the cluster asks for a token, and none is {'found' if _sends() else 'sent'}",
            hint=_WHERE if _sends() else f"RAY_AUTH_MODE=token sends it; {_WHERE}",
        )
    if code == codes.UNIMPLEMENTED:
        raise nothing_there(address, "what listens there speaks gRPC, but is not Ray's")
    if code == codes.DEADLINE_EXCEEDED or (code == codes.UNAVAILABLE and "timed out" in details):
        raise nothing_there(address, f"what listens there does not answer within {ANSWER_S:.0f} s")
    if code == codes.UNAVAILABLE:
        http = "HTTP/2" in details or "http1" in details
        raise nothing_there(address, "what listens there does not speak Ray's protocol" if http else "no answer")


_WHERE = "it is read from RAY_AUTH_TOKEN, from the file RAY_AUTH_TOKEN_PATH, or from ~/.ray/auth_token"


def _sends() -> bool:
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def _token() -> tuple[tuple[str, str], ...]:
    """The header with the token that Ray sends, as Ray finds it; none unless RAY_AUTH_MODE is `token`."""
    environment = os.environ
    if not _sends():
        return ()
    token = environment.get("RAY_AUTH_TOKEN", "")
    if not token:
        path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token")
        try:
            token = reader.text(path.expanduser(), LONGEST_TOKEN, regular=True)
        except (Unreadable, RuntimeError):
            return ()
    return (("authorization", f"Bearer {token.strip()}"),)
