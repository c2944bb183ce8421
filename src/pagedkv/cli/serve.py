"""``pagedkv serve``: an OpenAI-compatible server in front of the engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from pagedkv.cli.options import parse_bytes, with_engine_options

_SERVER, _ACCESS = "Server", "Access"


@with_engine_options
def serve(
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file, smollm2-135m or a Hugging Face id.")],
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", rich_help_panel=_SERVER)] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name(s) that clients use.", rich_help_panel=_SERVER)
    ] = None,
    root_path: Annotated[str, typer.Option(help="Path prefix behind a proxy.", rich_help_panel=_SERVER)] = "",
    max_body_bytes: Annotated[
        int,
        typer.Option(help="Larger bodies are refused.", parser=parse_bytes, metavar="SIZE", rich_help_panel=_SERVER),
    ] = 32 << 20,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get after SIGTERM.", rich_help_panel=_SERVER)
    ] = 30.0,
    status_interval: Annotated[
        float, typer.Option(help="Seconds between status lines; 0 for none.", rich_help_panel=_SERVER)
    ] = 10.0,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Ask for this key; may be repeated.", envvar="PAGEDKV_API_KEY", rich_help_panel=_ACCESS),
    ] = None,
    api_keys_file: Annotated[
        Path | None, typer.Option(help="A file with lines KEY [TENANT].", exists=True, rich_help_panel=_ACCESS)
    ] = None,
    share_prefixes: Annotated[
        bool, typer.Option("--share-prefixes", help="Let tenants share cached prefixes.", rich_help_panel=_ACCESS)
    ] = False,
    allowed_origins: Annotated[
        list[str] | None, typer.Option(help="Origins for CORS; may be repeated.", rich_help_panel=_ACCESS)
    ] = None,
    allow_credentials: Annotated[
        bool, typer.Option("--allow-credentials", help="CORS with credentials.", rich_help_panel=_ACCESS)
    ] = False,
    cache_map_show_text: Annotated[
        bool, typer.Option("--cache-map-show-text", help="Show prompt text on the cache map.", rich_help_panel=_ACCESS)
    ] = False,
    engine: dict[str, Any],
) -> None:
    """Serve MODEL over HTTP: /v1/chat/completions, /v1/completions, /metrics, the cache map at /cache and more."""
    from pagedkv.server.config import ServerConfig

    config = ServerConfig(
        host=host,
        port=port,
        served_model_name=tuple(served_model_name or ()),
        api_key=tuple(api_key or ()),
        api_keys_file=api_keys_file,
        share_prefixes=share_prefixes,
        allowed_origins=tuple(allowed_origins or ()),
        allow_credentials=allow_credentials,
        root_path=root_path,
        max_body_bytes=max_body_bytes,
        shutdown_timeout=shutdown_timeout,
        status_interval=status_interval,
        cache_map_show_text=cache_map_show_text,
    )
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    from pagedkv.async_llm import AsyncLLM
    from pagedkv.cli.progress import loading
    from pagedkv.server.run import serve as run

    with loading(model) as progress:
        llm = AsyncLLM(model, progress=progress, **engine)
    raise typer.Exit(run(llm, config))
