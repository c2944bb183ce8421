"""Who may call: API keys, and the tenant that a key stands for.

With no key configured every caller is let in. With keys, every route but ``/health`` and ``/ping`` needs one:
the rule is deny by default, on the path as the router sees it, so that a route added later is covered.
A key comes as ``Authorization: Bearer KEY`` (OpenAI's clients) or as the password of Basic authentication
(browsers, for the cache map). Keys are compared in constant time, all of them each time, and never logged.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from dataclasses import dataclass, field
from pathlib import Path

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send

from pagedkv.errors import InvalidRequest
from pagedkv.server.errors import error_response

OPEN_PATHS = frozenset({"/health", "/ping"})


@dataclass(frozen=True)
class ApiKeys:
    """``tenants``: key -> tenant name, or None for a key without one."""

    tenants: dict[str, str | None] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, keys: tuple[str, ...], file: Path | None = None) -> ApiKeys:
        """``file``: one key a line, with a tenant's name after it where it has one; ``#`` starts a comment."""
        tenants: dict[str, str | None] = dict.fromkeys(keys)
        if file is not None:
            for number, line in enumerate(file.read_text().splitlines(), 1):
                words = line.split("#", 1)[0].split()
                if len(words) > 2:
                    raise InvalidRequest(
                        f"api_keys_file: line {number} has {len(words)} words; a line is KEY or KEY TENANT",
                        field="api_keys_file",
                    )
                if words:
                    tenants[words[0]] = words[1] if len(words) == 2 else None
        if any(not key for key in tenants):
            raise InvalidRequest("api_key: an empty key would let nobody in and looks like no key", field="api_key")
        return cls(tenants)

    def find(self, presented: str) -> tuple[bool, str | None]:
        """(known, tenant). Every key is compared, so that the time tells nothing of which one matched."""
        known, tenant = False, None
        candidate = presented.encode()
        for key, owner in self.tenants.items():
            if hmac.compare_digest(key.encode(), candidate):
                known, tenant = True, owner
        return known, tenant


def presented_key(header: str) -> str | None:
    """The key in an ``Authorization`` header, or None. The scheme's case does not matter (RFC 9110)."""
    scheme, _, value = header.strip().partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return None
    return None


class RequireKey:
    """ASGI middleware: refuses what has no key, and leaves the tenant in ``scope["state"]["tenant"]``."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["tenant"] = None
        if not self.keys.tenants or get_route_path(scope) in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        key = presented_key(header.decode("latin-1"))
        known, tenant = self.keys.find(key) if key is not None else (False, None)
        if not known:
            message = "an API key is needed: Authorization: Bearer KEY" if key is None else "the API key is not known"
            response = error_response(
                401, message, code="invalid_api_key", headers={"WWW-Authenticate": 'Basic realm="pagedkv"'}
            )
            await response(scope, receive, send)
            return
        state["tenant"] = tenant
        await self.app(scope, receive, send)
