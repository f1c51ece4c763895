"""The name of a server: `openai:URL`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from genctl.errors import UsageError

SCHEME = "openai:"
KEYS = ("GENCTL_API_KEY", "OPENAI_API_KEY")  # environment variables that hold the key, the first one that is set


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
    url = text.removeprefix(SCHEME)
    if url == text:
        raise UsageError(f"backend {text}: expected openai:URL")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or not url.isprintable() or " " in url:
        raise UsageError(f"backend {text}: not a URL of http or https")
    if "@" in parts.netloc:
        raise UsageError(f"backend {text}: a URL may not hold a password; the key is read from {KEYS[0]} or {KEYS[1]}")
    if parts.query or parts.fragment:
        raise UsageError(f"backend {text}: a URL ends with its path, such as /v1")
    url = url.rstrip("/")
    base = url if re.search(r"/v\d+$", url) else f"{url}/v1"
    return Address(f"{SCHEME}{url}", base)
