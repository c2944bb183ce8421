"""The server under programs that were not written here: litellm, aiperf, guidellm, schemathesis, wrk.

    python tools/prove_server.py [--venvs DIR] [--model smollm2-135m] [NAME ...]

Starts a server on a free port of the loopback and runs the named programs against it (all, if none is named), each from
a virtual environment of its own under --venvs, which is made from the pins of tools/prove_server.txt where it is
missing. wrk comes from Debian. Prints what they say, shortened; leaves with status 1 if one of them is not content.
docs/server-proofs.md has an output.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT = 240  # seconds a program may take
NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 40, 128, 32  # of aiperf and guidellm, 8 at a time
ONE_TOKEN = '{"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}'
WRK_POST = f"""wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{ONE_TOKEN}'
"""
# Left out of schemathesis: methods that a route lacks get our own 405, and limits that depend on the model (context,
# vocabulary) are not in the schema, so that not all that fits the schema is taken.
NOT_CHECKED = "unsupported_method,positive_data_acceptance"


class NotContent(Exception):
    """A program ran and found fault; the text is what it said."""


@dataclass(frozen=True)
class Place:
    """Where programs run: ``tokenizer`` is a directory with the model's tokenizer, so that none asks a hub."""

    url: str
    model: str
    venvs: Path
    folder: Path
    tokenizer: Path

    def program(self, name: str, command: str | None = None) -> str:
        """The path of ``command`` in the environment of ``name``, which is made if need be."""
        home = self.venvs / name
        if not (home / "bin" / (command or name)).exists():
            pins = (HERE / "prove_server.txt").read_text()
            (pin,) = re.findall(rf"^{name}==\S+$", pins, re.MULTILINE)
            venv.create(home, with_pip=True)
            subprocess.run([home / "bin" / "pip", "install", "-q", pin], check=True)
        return str(home / "bin" / (command or name))

    def run(self, *command: str) -> str:
        """What the command prints. Raises NotContent if its status is not 0."""
        quiet = {"NO_COLOR": "1", "COLUMNS": "120", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
        done = subprocess.run(
            command, cwd=self.folder, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=LIMIT
        )
        if done.returncode:
            raise NotContent(f"status {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
        return done.stdout


def litellm(place: Place) -> str:
    return place.run(place.program("litellm", "python"), str(HERE / "prove_litellm.py"), place.url, place.model)


def schemathesis(place: Place) -> str:
    options = ["--max-examples", "60", "--exclude-checks", NOT_CHECKED, "--seed", "1", "--no-color"]
    said = place.run(place.program("schemathesis"), "run", f"{place.url}/openapi.json", *options)
    return said[said.rindex("API Operations:") :]


def aiperf(place: Place) -> str:
    """Completions, streamed, so that its own count of tokens can be held against the server's."""
    out = place.folder / "aiperf"
    shape = ["--concurrency", "8", "--request-count", str(NUM_REQUESTS), "--random-seed", "1"]
    shape += ["--isl", str(PROMPT_TOKENS), "--osl", str(OUTPUT_TOKENS)]
    shape += ["--extra-inputs", "ignore_eos:true"]
    target = ["-m", place.model, "--url", place.url, "--endpoint-type", "completions", "--streaming"]
    where = ["--tokenizer", str(place.tokenizer), "--artifact-dir", str(out), "--ui", "none"]
    place.run(place.program("aiperf"), "profile", *target, *shape, *where)
    found = json.loads((out / "profile_export_aiperf.json").read_text())
    spans = ("time_to_first_token", "inter_token_latency", "request_latency")
    singles = ("request_count", "request_error_rate", "output_token_throughput", "usage_prompt_tokens_diff_pct")
    lines = [
        f"{name:<32}avg {row['avg']:.1f}  p50 {row['p50']:.1f}  p99 {row['p99']:.1f} {row['unit']}"
        for name, row in ((name, found[name]) for name in spans)
    ]
    lines += [f"{name:<32}{found[name]['avg']:.2f} {found[name]['unit']}" for name in singles]
    if found["request_error_rate"]["avg"] or found["usage_prompt_tokens_diff_pct"]["avg"]:
        raise NotContent("\n".join(lines))
    return "\n".join(lines)


def guidellm(place: Place) -> str:
    """Chats, streamed."""
    out = place.folder / "guidellm.json"
    target = ["--backend", f"kind=openai_http,target={place.url},model={place.model}"]
    target += ["--tokenizer", f"kind=hf_auto,model={place.tokenizer}"]
    shape = ["--profile", "kind=concurrent,streams=8", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    shape += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"]
    shape += ["--output", f"kind=json,path={out}", "--disable-console"]
    place.run(place.program("guidellm"), "run", *target, *shape)
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    found = benchmark["metrics"]
    lines = []
    for name in ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency"):
        row = found[name]["successful"]
        points = row["percentiles"]
        lines.append(f"{name:<32}avg {row['mean']:.1f}  p50 {points['p50']:.1f}  p99 {points['p99']:.1f}")
    totals = found["request_totals"]
    lines.append(f"{'request_totals':<32}{totals}")
    lines.append(f"{'output_tokens_per_second':<32}{found['output_tokens_per_second']['successful']['mean']:.1f}")
    if totals["successful"] != NUM_REQUESTS:
        raise NotContent("\n".join(lines))
    return "\n".join(lines)


def wrk(place: Place) -> str:
    """Raw concurrency: 64 connections on /health, then on completions of one token."""
    program = shutil.which("wrk")
    if program is None:
        raise NotContent("not installed: apt-get install wrk")
    script = place.folder / "post.lua"
    script.write_text(WRK_POST)
    common = [program, "-t2", "-c64", "-d6s", "--timeout", "20s", "--latency"]
    said = [place.run(*common, f"{place.url}/health")]
    said.append(place.run(*common, "-s", str(script), f"{place.url}/v1/completions"))
    if bad := re.findall(r"Non-2xx.*|Socket errors.*", "".join(said)):
        raise NotContent("\n".join([*bad, *said]))
    wanted = re.compile(r"^Running|^ +(50|99)%|requests in|^Requests/sec")
    return "\n".join(line for text in said for line in text.splitlines() if wanted.search(line))


PROOFS: dict[str, Callable[[Place], str]] = {
    proof.__name__: proof for proof in (litellm, schemathesis, aiperf, guidellm, wrk)
}


def export_tokenizer(model: str, folder: Path) -> Path:
    """The model's tokenizer as transformers reads it. (Load tools count tokens with one of their own.)"""
    from pagedkv.model.load import load_model

    tokenizer = load_model(model).tokenizer
    folder.mkdir()
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer._special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


@contextmanager
def server(model: str) -> Iterator[str]:
    """``pagedkv serve`` on a free port; its URL."""
    command = [sys.executable, "-m", "pagedkv", "serve", model, "--port", "0", "--served-model-name", Path(model).name]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        started = next((m for m in (re.search(r"running on (\S+)", line) for line in process.stderr) if m), None)
        if started is None:
            raise SystemExit(f"the server did not start: status {process.wait()}")
        threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True).start()
        yield started[1]
        process.terminate()
        print(f"\n-- the server, after SIGTERM: status {process.wait(60)}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PROOFS))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--venvs", type=Path, default=Path(tempfile.gettempdir()) / "pagedkv-proofs")
    options = parser.parse_args()
    if unknown := set(options.names) - set(PROOFS):
        parser.error(f"no proof is called {', '.join(sorted(unknown))}; there are {', '.join(PROOFS)}")
    unhappy = []
    with tempfile.TemporaryDirectory() as temporary, server(options.model) as url:
        folder = Path(temporary)
        tokenizer = export_tokenizer(options.model, folder / "tokenizer")
        place = Place(url, Path(options.model).name, options.venvs.resolve(), folder, tokenizer)
        for name in options.names or PROOFS:
            start = time.monotonic()
            try:
                said = PROOFS[name](place)
            except (NotContent, subprocess.SubprocessError) as error:
                unhappy.append(name)
                said = f"NOT CONTENT: {error}"
            print(f"\n-- {name} ({time.monotonic() - start:.0f} s)\n{said.strip()}", flush=True)
    return 1 if unhappy else 0


if __name__ == "__main__":
    raise SystemExit(main())
