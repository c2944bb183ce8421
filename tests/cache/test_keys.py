from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import fields, replace

import pytest

from pagedkv.cache.keys import KeyChain, KeyScope, MediaSpan, decode_tokens, encode_tokens
from pagedkv.cache.native import IN_PYTHON, extension
from pagedkv.errors import InvalidRequest


def keys(
    tokens: list[int], scope: KeyScope | None = None, media: tuple[MediaSpan, ...] = (), size: int = 4
) -> list[bytes]:
    chain = KeyChain(size, scope, media)
    chain.extend(tokens)
    return chain.keys


def test_a_key_stands_for_the_whole_prefix() -> None:
    a, b = keys([1, 2, 3, 4, 9, 9, 9, 9]), keys([1, 2, 3, 5, 9, 9, 9, 9])
    assert a[0] != b[0]
    assert a[1] != b[1]  # same text in the second block, another history
    assert keys([1, 2, 3, 4, 9, 9, 9, 9, 7]) == a  # an incomplete block has no key
    assert all(len(key) == 32 for key in a)


def test_extending_in_pieces_is_extending_at_once() -> None:
    tokens = list(range(100, 131))
    whole, pieces = KeyChain(4), KeyChain(4)
    whole.extend(tokens)
    for start in range(0, 31, 3):
        pieces.extend(tokens[start : start + 3])
    assert (pieces.keys, pieces.chunks, pieces.tail, pieces.num_tokens) == (whole.keys, whole.chunks, whole.tail, 31)
    fork = whole.fork()
    fork.extend([1, 2, 3, 4])
    assert len(whole.keys) == 7
    assert fork.keys[:7] == whole.keys
    whole.truncate(2)
    assert (whole.num_tokens, len(whole.keys)) == (8, 2)
    whole.extend(tokens[8:])
    assert whole.keys == pieces.keys


@pytest.mark.parametrize("part", [part.name for part in fields(KeyScope)])
def test_every_part_of_the_scope_changes_every_key(part: str) -> None:
    plain, other = keys([1] * 8), keys([1] * 8, replace(KeyScope(), **{part: "x"}))
    assert not set(plain) & set(other)


def test_scope_parts_do_not_run_into_each_other() -> None:
    scopes = [
        KeyScope(model="a", rope="bc"),
        KeyScope(model="ab", rope="c"),
        KeyScope(model="abc"),
        KeyScope(rope="abc"),
        KeyScope(adapter="tenant"),  # an adapter named like a salt
        KeyScope(salt="tenant"),
        KeyScope(adapter="tenant", salt="tenant"),
        KeyScope(model="a\x00", rope="b"),
        KeyScope(model="a", rope="\x00b"),
    ]
    assert len({scope.root(4) for scope in scopes}) == len(scopes)
    assert KeyScope().root(4) != KeyScope().root(8)


def test_the_salt_is_not_shown() -> None:
    assert "secret" not in repr(KeyScope(model="m", salt="secret"))


def test_a_scope_part_that_is_no_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="adapter is a int"):
        KeyScope(adapter=7)  # type: ignore[arg-type]


def test_b10_all_32_bits_of_a_token_count() -> None:
    base = [65] * 32
    for other in (321, 65 + 2**16, 65 + 2**24, 65 + 2**31):
        assert not set(keys(base)) & set(keys([other] * 32))
    assert keys([1, 23, 4, 5]) != keys([12, 3, 4, 5])
    assert keys([0, 0, 0, 0]) != keys([0, 0, 0, 0], size=2)[1:]


@pytest.mark.parametrize("bad", [-1, 2**32, None, 1.5, "7"])
def test_b10_what_is_no_token_id_is_refused(bad: object) -> None:
    with pytest.raises(InvalidRequest, match=r"token .* at position 2 is not a token id"):
        encode_tokens([1, 2, bad])  # type: ignore[list-item]


def test_tokens_survive_the_encoding() -> None:
    tokens = [0, 1, 255, 256, 2**16, 2**31, 2**32 - 1]
    assert decode_tokens(encode_tokens(tokens)) == tuple(tokens)
    assert encode_tokens([1]) == b"\x01\x00\x00\x00"


def test_b12_the_digest_is_the_same_in_every_process() -> None:
    program = (
        "from pagedkv.cache.keys import KeyChain, KeyScope, MediaSpan\n"
        "chain = KeyChain(4, KeyScope(model='m', salt='s'), [MediaSpan(1, 2, 'image', b'x')])\n"
        "chain.extend(range(9))\n"
        "print(chain.keys[-1].hex())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    chain = KeyChain(4, KeyScope(model="m", salt="s"), [MediaSpan(1, 2, "image", b"x")])
    chain.extend(range(9))
    assert printed == {chain.keys[-1].hex()}
    # a known value: keys that were stored yesterday must be found tomorrow
    assert chain.keys[-1].hex() == "9af17f33fe81eaa193b17e659515bd26dea2baa6e1af0caa9c7bc2cb886d5d1e"


def test_b15_media_are_part_of_the_key() -> None:
    tokens = [1] * 16

    def with_media(*spans: MediaSpan) -> list[bytes]:
        return keys(tokens, media=spans)

    x, y = MediaSpan(6, 6, "image", b"\x01" * 32), MediaSpan(6, 6, "image", b"\x02" + b"\x01" * 31)
    plain, with_x, with_y = keys(tokens), with_media(x), with_media(y)
    assert with_x[0] == with_y[0] == plain[0]  # blocks before the placeholder
    for i in (1, 2, 3):
        assert len({plain[i], with_x[i], with_y[i]}) == 3
    assert with_media(x) == with_x
    assert with_media(replace(x, offset=7))[1] != with_x[1]
    assert with_media(replace(x, kind="audio"))[1] != with_x[1]
    assert with_media(replace(x, length=5))[1] != with_x[1]
    a, b = MediaSpan(4, 2, "image", b"a"), MediaSpan(6, 2, "image", b"b")
    swapped = with_media(replace(a, offset=6), replace(b, offset=4))
    assert with_media(a, b)[1] != swapped[1]
    assert with_media(b, a) == with_media(a, b)  # the order in which they are named does not matter


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 0)])
def test_a_media_span_without_a_place_is_refused(offset: int, length: int) -> None:
    with pytest.raises(InvalidRequest, match="media span"):
        MediaSpan(offset, length, "image", b"x")


def test_keys_cost_one_hash_of_one_block_each(monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedkv.cache import keys as module

    sizes: list[int] = []
    real = module.sha256

    def counted(message: bytes) -> bytes:
        sizes.append(len(message))
        return real(message)

    monkeypatch.setattr(module, "sha256", counted)
    monkeypatch.setattr(module, "chain_blocks", IN_PYTHON["chain_blocks"])
    chain = KeyChain(16)
    del sizes[:]
    chain.extend(range(32_768))
    assert len(sizes) == 2048
    assert max(sizes) < 16 * 4 + 64


@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 256])
def test_the_native_chain_is_the_chain(block_size: int) -> None:
    if extension is None:
        pytest.skip("the native extension is not built (PAGEDKV_NATIVE=0)")
    chain, chain_in_python = extension.chain_blocks, IN_PYTHON["chain_blocks"]
    data = encode_tokens([(i * 2654435761) % 2**32 for i in range(block_size * 7)])
    parent = KeyScope(model="m").root(block_size)
    assert chain(parent, data, 4 * block_size) == chain_in_python(parent, data, 4 * block_size)
    assert chain(parent, b"", 4 * block_size) == ([], [])
    assert chain(parent, data[:-1], 4 * block_size) == chain_in_python(parent, data[:-1], 4 * block_size)
    for bad in ((parent[:-1], data, 4 * block_size), (parent, data, 0)):
        with pytest.raises(ValueError, match=r"32 bytes|one byte"):
            chain(*bad)


@pytest.mark.parametrize("portable", [False, True])
def test_the_native_digest_is_sha256(portable: bool) -> None:
    module = pytest.importorskip("pagedkv._cache", reason="the native extension is not built (PAGEDKV_NATIVE=0)")
    for size in [*range(200), 1000]:
        message = bytes(i * 31 % 256 for i in range(size))
        assert module.digest(message, portable) == hashlib.sha256(message).digest()
