"""``pagedkv serve``: an OpenAI-compatible server in front of the engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from pagedkv.cli.options import ENGINE_FLAGS, flag, parse_bytes, with_options

_SERVER, _ACCESS = "Server", "Access"
SERVER_FLAGS = (
    flag("host", str, _SERVER, "Address to listen on; 127.0.0.1."),
    flag("port", int, _SERVER, "Port to listen on; 8000."),
    flag("served_model_name", list[str], _SERVER, "Name(s) that clients use."),
    flag("root_path", str, _SERVER, "Path prefix behind a proxy."),
    flag("max_body_bytes", int, _SERVER, "Larger bodies are refused; 32MiB.", parser=parse_bytes, metavar="SIZE"),
    flag("shutdown_timeout", float, _SERVER, "Seconds that running requests get after SIGTERM; 30."),
    flag("record", Path, _SERVER, "Record lengths and hashes of the traffic, for `replay`; a new file."),
    flag("status_interval", float, _SERVER, "Seconds between status lines; 10, 0 for none."),
    flag("api_key", list[str], _ACCESS, "Ask for this key; may be repeated.", envvar="PAGEDKV_API_KEY"),
    flag("api_keys_file", Path, _ACCESS, "A file with lines KEY [TENANT].", exists=True),
    flag("share_prefixes", bool, _ACCESS, "Let tenants share cached prefixes.", spelled="--share-prefixes"),
    flag("allowed_origins", list[str], _ACCESS, "Origins for CORS; may be repeated."),
    flag("allow_credentials", bool, _ACCESS, "CORS with credentials.", spelled="--allow-credentials"),
    flag("cache_map_show_text", bool, _ACCESS, "Show prompts on the cache map.", spelled="--cache-map-show-text"),
)


@with_options(server=SERVER_FLAGS, engine=ENGINE_FLAGS)
def serve(
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file, smollm2-135m or a Hugging Face id.")],
    *,
    server: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Serve MODEL over HTTP: /v1/chat/completions, /v1/completions, /metrics, the cache map at /cache and more."""
    from pagedkv.server.config import ServerConfig

    settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in server.items()}
    config = ServerConfig(**settings)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    from pagedkv.async_llm import AsyncLLM
    from pagedkv.cli.progress import loading
    from pagedkv.server.run import serve as run

    with loading(model) as progress:
        llm = AsyncLLM(model, progress=progress, **engine)
    raise typer.Exit(run(llm, config))
