"""How the server is reached and what it allows. The engine's own settings are in :mod:`pagedkv.config`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pagedkv.errors import InvalidRequest


@dataclass(frozen=True)
class ServerConfig:
    """``max_body_bytes``: larger request bodies are a 413. ``shutdown_timeout``: seconds that running
    requests get to finish after SIGTERM. ``status_interval``: seconds between status lines in the log, 0 for none."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_key: tuple[str, ...] = ()
    api_keys_file: Path | None = None
    share_prefixes: bool = False
    allowed_origins: tuple[str, ...] = ()
    allow_credentials: bool = False
    root_path: str = ""
    max_body_bytes: int = 32 << 20
    shutdown_timeout: float = 30.0
    status_interval: float = 10.0
    cache_map_show_text: bool = False
    record: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidRequest(f"port: {self.port} is not between 0 and 65535", field="port")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise InvalidRequest(
                f"root_path: {self.root_path!r} must begin with / and not end with it, as in /llm", field="root_path"
            )
        if self.max_body_bytes < 1024:
            raise InvalidRequest(
                f"max_body_bytes: {self.max_body_bytes} is below the least useful limit of 1024", field="max_body_bytes"
            )
        if self.shutdown_timeout < 0:
            raise InvalidRequest(
                f"shutdown_timeout: {self.shutdown_timeout} s is negative; 0 cuts at once", field="shutdown_timeout"
            )
        if self.allow_credentials and "*" in self.allowed_origins:
            raise InvalidRequest(
                "allowed_origins: '*' with credentials would let any site use a visitor's key; name the origins",
                field="allowed_origins",
            )
