"""A checkout whose compiled parts are missing or old says so, once, and names the remedy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pagedkv.engine import extensions
from pagedkv.errors import BackendUnavailable

pytest.importorskip("pagedkv._native")


@pytest.fixture
def sources(repository: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(repository / "csrc", tmp_path / "csrc"))


def test_what_was_just_built_has_nothing_to_complain_about(repository: Path) -> None:
    """CMakeLists.txt and extensions.py take the same digest. If this fails after an edit of csrc/: `make setup`."""
    assert repository / "csrc" == extensions.SOURCES
    assert extensions.complaints() == []


@pytest.mark.parametrize("change", ["edited", "new", "gone"])
def test_other_sources_are_told_apart(sources: Path, change: str) -> None:
    if change == "edited":
        (sources / "simd_neon.hpp").write_text("//")
    elif change == "new":
        (sources / "more.hpp").touch()
    else:
        (sources / "block.hpp").unlink()
    old = extensions.complaints(sources)
    assert [complaint.partition(" was built from other sources")[0] for complaint in old] == [
        "pagedkv._native",
        "pagedkv._cache",
    ]
    assert all("make setup" in complaint for complaint in old)


def test_what_is_not_compiled_into_them_does_not_matter(sources: Path) -> None:
    shutil.rmtree(sources / "check")
    (sources / "notes.txt").touch()
    assert extensions.complaints(sources) == []


def test_an_installed_package_has_no_sources_to_differ_from(tmp_path: Path) -> None:
    assert extensions.complaints(tmp_path / "csrc") == []


def test_missing_parts_are_told_once_unless_they_were_switched_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise BackendUnavailable("the native extension is not installed (no module)")

    monkeypatch.setattr(extensions, "kernels", missing)
    monkeypatch.setattr(extensions, "loops", None)
    extensions.warn_once.cache_clear()
    extensions.warn_once()
    extensions.warn_once()
    told = [record.getMessage() for record in caplog.records if record.name == extensions.__name__]
    assert [message.split(" is not installed")[0] for message in told] == ["the native extension", "pagedkv._cache"]
    assert all("make setup" in message for message in told)
    monkeypatch.setenv("PAGEDKV_NATIVE", "0")
    assert extensions.complaints() == []
    extensions.warn_once.cache_clear()
