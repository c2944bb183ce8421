"""deploy/ agrees with what it deploys. Docker and systemd do not run here, so what they would read is checked."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedkv.server.config import ServerConfig

INSTALL = "apt-get install systemd"


@pytest.fixture
def instructions(repository: Path) -> list[tuple[str, str]]:
    """(instruction, its arguments) of deploy/Dockerfile, continued lines joined."""
    text = re.sub(r"\\\n\s*", "", (repository / "deploy/Dockerfile").read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


@pytest.fixture
def unit(repository: Path) -> dict[str, str]:
    """The keys of the unit; those that come once."""
    lines = (repository / "deploy/pagedkv.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def all_of(instructions: list[tuple[str, str]], name: str) -> list[str]:
    return [rest for word, rest in instructions if word == name]


def parses(arguments: list[str]) -> None:
    """Fails unless ``pagedkv`` takes these arguments; nothing is run."""
    import typer.main

    from pagedkv.cli.main import app

    verb, *rest = arguments
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    command.make_context(verb, rest)


def test_the_image_is_made_of_what_is_here(instructions: list[tuple[str, str]], repository: Path) -> None:
    makefile = (repository / "Makefile").read_text()
    bases = all_of(instructions, "FROM")
    stages = [base.split(" AS ")[1] for base in bases if " AS " in base]
    images = {base.split(" AS ")[0] for base in bases}
    assert len(images) == 1, "the environment is copied from one image to the other, so their Python must be one"
    version = re.fullmatch(r"python:(\d+)\.(\d+)-slim-bookworm", images.pop())
    assert version is not None
    least = re.search(r'requires-python = ">=(\d+)\.(\d+)"', (repository / "pyproject.toml").read_text())
    assert least is not None
    assert tuple(map(int, version.groups())) >= tuple(map(int, least.groups()))
    for copied in all_of(instructions, "COPY"):
        stage = re.match(r"--from=(\S+) ", copied)
        assert stage is None or stage[1] in stages
    (made,) = [run for run in all_of(instructions, "RUN") if run.startswith("make ")]
    _, target, *variables = shlex.split(made)
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    for variable in variables:
        name = variable.partition("=")[0]
        assert re.search(rf"^{name} \?=", makefile, re.MULTILINE), f"the Makefile has no {name}"
        assert any(argument.startswith(f"{name}=") for argument in all_of(instructions, "ARG"))
    packages = next(run for run in all_of(instructions, "RUN") if "apt-get" in run)
    assert {"g++", "make"} <= set(packages.split())


def test_the_image_runs_what_was_made(instructions: list[tuple[str, str]], repository: Path) -> None:
    (home,) = all_of(instructions, "WORKDIR")
    assert f"--from=build {home} {home}" in all_of(instructions, "COPY")
    venv = re.search(r"^VENV \?= (\S+)", (repository / "Makefile").read_text(), re.MULTILINE)
    assert venv is not None
    assert all_of(instructions, "ENV") == [f"PATH={home}/{venv[1]}/bin:$PATH"]
    port = ServerConfig().port
    assert all_of(instructions, "EXPOSE") == [str(port)]
    (check,) = all_of(instructions, "HEALTHCHECK")
    assert f"http://127.0.0.1:{port}/health" in check
    source = re.search(r'python -c "(.*)"', check)
    assert source is not None
    compile(source[1], "HEALTHCHECK", "exec")


@pytest.mark.parametrize("key", [None, "secret"])
def test_the_image_starts_with_a_key_only(instructions: list[tuple[str, str]], tmp_path: Path, key: str | None) -> None:
    """Its command with a ``pagedkv`` that prints what it was given."""
    (command,) = all_of(instructions, "CMD")
    program = tmp_path / "pagedkv"
    program.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"} | ({} if key is None else {"PAGEDKV_API_KEY": key})
    done = subprocess.run(json.loads(command), capture_output=True, text=True, env=environment)
    if key is None:
        assert (done.returncode != 0, done.stdout) == (True, "")
        assert "set PAGEDKV_API_KEY" in done.stderr
        return
    arguments = json.loads(done.stdout)
    parses(arguments)
    assert arguments[0] == "serve"
    assert "0.0.0.0" in arguments
    assert key not in done.stdout


def test_no_environment_of_this_machine_reaches_the_image(repository: Path) -> None:
    """`make setup` does nothing where its stamp lies in .venv, and a virtual environment does not move."""
    lines = (repository / ".dockerignore").read_text().splitlines()
    ignored = [line for line in lines if line and not line.startswith("#")]
    assert {".venv", "build", ".git"} <= set(ignored)
    needed = ["Makefile", "pyproject.toml", "constraints.txt", "CMakeLists.txt", "README.md", "LICENSE", "src", "csrc"]
    for name in [*needed, "tools/setup.sh"]:
        assert (repository / name).exists()
        assert not any(fnmatch.fnmatch(name, pattern) for pattern in ignored), name


def test_the_unit_runs_what_the_image_runs(
    unit: dict[str, str], instructions: list[tuple[str, str]], repository: Path
) -> None:
    program, verb, arguments = unit["ExecStart"].split(" ")
    (home,) = all_of(instructions, "WORKDIR")
    assert program == f"{home}/.venv/bin/pagedkv"
    assert arguments == "$PAGEDKV_ARGS"
    example = re.search(r"\(PAGEDKV_ARGS=(.+)\)", (repository / "deploy/pagedkv.service").read_text())
    assert example is not None
    parses([verb, *shlex.split(example[1])])
    assert unit["Restart"] == "on-failure"  # a dead engine is status 1, a clean stop 0 (tests/server/test_endings.py)
    from pagedkv.server.run import CUT_GRACE

    assert float(unit["TimeoutStopSec"]) > ServerConfig().shutdown_timeout + CUT_GRACE
    assert unit["Environment"] == f"HF_HOME=/var/cache/{unit['CacheDirectory']}"


@pytest.mark.parametrize("broken", [False, True])
def test_systemd_understands_the_unit(
    system_tool: Callable[[str, str], str], repository: Path, tmp_path: Path, broken: bool
) -> None:
    text = (repository / "deploy/pagedkv.service").read_text()
    program = re.search(r"^ExecStart=(\S+)", text, re.MULTILINE)
    assert program is not None
    copy = tmp_path / "pagedkv.service"
    text = text.replace(program[1], "/bin/true")  # the program is not installed here
    copy.write_text(text.replace("RestartSec=", "RestartSecs=") if broken else text)
    done = subprocess.run(
        [system_tool("systemd-analyze", INSTALL), "verify", "--man=no", str(copy)], capture_output=True, text=True
    )
    assert ("RestartSecs" in done.stderr) == broken, done.stderr
    assert broken or (done.returncode, done.stderr) == (0, ""), done.stderr
