"""The name of a server: `openai:URL`."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from genctl.errors import UsageError, hide_secrets

SCHEME = "openai:"
KEYS = ("GENCTL_API_KEY", "OPENAI_API_KEY")  # environment variables that hold a key
OPENAI_HOST = "api.openai.com"
OPENAI_URL = "OPENAI_BASE_URL"  # environment variable of OpenAI's own programs: another server for their key


@dataclass(frozen=True)
class Address:
    """A server's address. `base` is where its interface begins, such as http://localhost:8080/v1."""

    name: str  # what records and messages call it
    base: str

    @property
    def root(self) -> str:
        """The base without its version."""
        return re.sub(r"/v\d+$", "", self.base)

    @property
    def is_here(self) -> bool:
        """Whether it is on this machine, where no proxy is needed."""
        host = urlsplit(self.base).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"


def read(value: str | Sequence[str]) -> tuple[Address, ...]:
    """The addresses of the knob `backend`. Raises UsageError for each that is none."""
    addresses: list[Address] = []
    mistakes: list[str] = []
    for text in [value] if isinstance(value, str) else value:
        try:
            address = _read(text)
        except UsageError as error:
            mistakes.append(error.message)
            continue
        if address in addresses:
            mistakes.append(f"backend {address.name} is named twice")
        addresses.append(address)
    if mistakes:
        raise UsageError("\n".join(mistakes), hint="write a backend as openai:http://localhost:8080/v1")
    return tuple(addresses)


def _read(text: str) -> Address:
    url, shown = text.removeprefix(SCHEME), hide_secrets(text)
    if url == text:
        raise UsageError(f"backend {shown}: expected openai:URL")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or not url.isprintable() or " " in url:
        raise UsageError(f"backend {shown}: not a URL of http or https")
    if "@" in parts.netloc:
        raise UsageError(f"backend {shown}: a URL may not hold a password; the key is read from {KEYS[0]} or {KEYS[1]}")
    if parts.query or parts.fragment:
        raise UsageError(f"backend {shown}: a URL ends with its path, such as /v1")
    url = url.rstrip("/")
    base = url if re.search(r"/v\d+$", url) else f"{url}/v1"
    return Address(f"{SCHEME}{url}", base)


def key_of(address: Address) -> tuple[str, str]:
    """The key for a server, and the hint for a server that wants a key where there is none.

    `GENCTL_API_KEY` goes to every server: the user names all that get it (`check_key` in `genctl/commands/job.py`).
    `OPENAI_API_KEY` was given for OpenAI: it goes there, over HTTPS, or to the server that `OPENAI_BASE_URL` names.
    """
    own, openai = (os.environ.get(name, "").strip() for name in KEYS)
    hint = f"a key is needed: set {KEYS[0]}"
    if own or not openai:
        return own, hint
    parts = urlsplit(address.base)
    host = parts.hostname or ""
    is_openai = parts.scheme == "https" and (host == OPENAI_HOST or host.endswith(f".{OPENAI_HOST}"))
    if is_openai or _origin(address.base) == _origin(os.environ.get(OPENAI_URL, "").strip()):
        return openai, hint
    return "", f"{hint}; {KEYS[1]} is for {OPENAI_HOST} or the server of {OPENAI_URL}"


def _origin(url: str) -> tuple[str, str, int | None] | None:
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return None
    return (parts.scheme, parts.hostname, port) if parts.hostname else None
