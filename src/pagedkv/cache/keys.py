"""Block keys: what a block's KV depends on, as one digest.

    key_i = SHA-256(key_{i-1}, tokens of block i, media that begin in block i)      key_{-1} = root of the KeyScope

A key therefore stands for the whole prefix up to the end of its block: equal text after another history, under
another model, adapter or salt, or around another image has another key. Every part is tagged with its kind and
preceded by its length, so that no two parts can run into each other; token ids are 32-bit little-endian. The digest
is the same in every process and on every machine.

Cost: one SHA-256 of about 100 bytes per full block, once in the life of a chain; a key is 32 bytes, never a tuple of
the prompt. The prefix cache compares tokens on a hit as well, so a collision costs a miss, not a wrong answer.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from pagedkv.cache.native import native
from pagedkv.errors import InvalidRequest

_TOKEN_BYTES = 4


def _part(tag: bytes, content: bytes) -> bytes:
    return tag + len(content).to_bytes(4, "little") + content


def sha256(message: bytes) -> bytes:
    """The one hash function of all keys."""
    return hashlib.sha256(message).digest()


@dataclass(frozen=True)
class KeyScope:
    """Under what a key is valid. Equal text in two scopes never shares a block.

    model:     fingerprint of the weights (``LoadedModel.fingerprint``), not a display name
    rope:      position encoding as configured
    dtype:     of the activations
    kv_dtype:  of the pool ("auto": the activations')
    adapter:   content identity of the adapter, its scale included; a display name is too weak, since another
               file can be loaded under it
    salt:      keeps tenants apart; enters the root only, the chain carries it; not shown by ``repr``
    """

    model: str = ""
    rope: str = ""
    dtype: str = ""
    kv_dtype: str = ""
    adapter: str = ""
    salt: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if not isinstance(value, str):
                raise InvalidRequest(f"{part.name} is a {type(value).__name__}; a string is needed", field=part.name)

    def root(self, block_size: int) -> bytes:
        """The key before the first block."""
        message = b"".join(
            _part(b"S", part.name.encode()) + _part(b"V", getattr(self, part.name).encode("utf-8", "surrogatepass"))
            for part in fields(self)
        )
        return sha256(b"pagedkv scope 1" + _part(b"B", block_size.to_bytes(4, "little")) + message)


@dataclass(frozen=True, order=True)
class MediaSpan:
    """Content that stands behind placeholder tokens: an image, audio, embeddings.

    offset:  position of its first placeholder in the prompt
    length:  number of placeholder tokens
    kind:    what it is ("image", "audio", "embeds")
    digest:  of the content; whole, never cut short
    """

    offset: int
    length: int
    kind: str
    digest: bytes

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 1:
            raise InvalidRequest(
                f"a media span of {self.length} tokens at {self.offset}; it needs offset >= 0 and length >= 1",
                field="media",
            )

    def encode(self, block_size: int) -> bytes:
        """Its part of the message of the block in which it begins."""
        place = (self.offset % block_size).to_bytes(4, "little") + self.length.to_bytes(4, "little")
        return _part(b"O", place) + _part(b"K", self.kind.encode()) + _part(b"D", self.digest)


@native
def pack_tokens(tokens: list[int]) -> bytes | None:
    """The ids as 32-bit little-endian, 4 bytes each; None where one of them is no integer from 0 to 2**32 - 1."""
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError):
        return None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as 32-bit little-endian, 4 bytes each. An id outside 0 .. 2**32 - 1 is an InvalidRequest."""
    if isinstance(tokens, array) and tokens.typecode == "I" and sys.byteorder == "little":
        return tokens.tobytes()
    given = tokens if isinstance(tokens, list) else list(tokens)
    packed = pack_tokens(given)
    if packed is not None:
        return packed
    position, token = next(
        (position, token)
        for position, token in enumerate(given)
        if not hasattr(token, "__index__") or not 0 <= token.__index__() < 2**32
    )
    raise InvalidRequest(
        f"token {token!r} at position {position} is not a token id (an integer from 0 to 2**32 - 1)", field="prompt"
    )


def decode_tokens(encoded: bytes) -> tuple[int, ...]:
    """The token ids of ``encode_tokens``."""
    tokens = array("I", encoded)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tuple(tokens)


def block_key(parent: bytes, chunk: bytes, media: Sequence[MediaSpan] = ()) -> bytes:
    """The key of a block with the encoded tokens ``chunk`` after the key ``parent``."""
    block_size = len(chunk) // _TOKEN_BYTES
    return sha256(_part(b"P", parent) + _part(b"T", chunk) + b"".join(span.encode(block_size) for span in media))


@native
def chain_blocks(parent: bytes, data: bytes, width: int) -> tuple[list[bytes], list[bytes]]:
    """The keys of the full blocks of ``width`` bytes in ``data`` after the key ``parent``, and those blocks."""
    chunks = [data[start : start + width] for start in range(0, len(data) // width * width, width)]
    # block_key with everything that does not change from block to block taken out of the loop
    before, between = b"P" + len(parent).to_bytes(4, "little"), b"T" + width.to_bytes(4, "little")
    join, digest, keys = b"".join, sha256, []
    for chunk in chunks:
        parent = digest(join((before, parent, between, chunk)))
        keys.append(parent)
    return keys, chunks


class KeyChain:
    """The keys of one growing text: one per full block, each computed once.

    keys:    list of 32-byte digests, one per full block
    chunks:  list of the same length: the tokens of each full block, encoded
    tail:    the encoded tokens after the last full block
    media:   dict, block -> the media that begin in it
    """

    __slots__ = ("block_size", "chunks", "keys", "media", "root", "scope", "tail")

    def __init__(self, block_size: int, scope: KeyScope | None = None, media: Sequence[MediaSpan] = ()) -> None:
        if block_size < 1:
            raise InvalidRequest(f"block_size is {block_size}; at least 1 is needed", field="block_size")
        self.block_size = block_size
        self.scope = KeyScope() if scope is None else scope
        self.root = self.scope.root(block_size)
        self.keys: list[bytes] = []
        self.chunks: list[bytes] = []
        self.tail = b""
        self.media: dict[int, tuple[MediaSpan, ...]] = {}
        for span in sorted(media):
            block = span.offset // block_size
            self.media[block] = (*self.media.get(block, ()), span)

    @property
    def num_tokens(self) -> int:
        """Tokens seen so far."""
        return len(self.keys) * self.block_size + len(self.tail) // _TOKEN_BYTES

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens and computes the keys of the blocks that they complete."""
        data = self.tail + encode_tokens(tokens)
        width = self.block_size * _TOKEN_BYTES
        full = len(data) // width * width
        self.tail = data[full:]
        if full == 0:
            return
        parent = self.keys[-1] if self.keys else self.root
        keys, chunks = chain_blocks(parent, data, width)
        if self.media:
            keys, first = [], len(self.keys)
            for index, chunk in enumerate(chunks, first):
                parent = block_key(parent, chunk, self.media.get(index, ()))
                keys.append(parent)
        self.keys += keys
        self.chunks += chunks

    def truncate(self, num_blocks: int) -> None:
        """Forgets everything after the first ``num_blocks`` full blocks, the incomplete block too."""
        del self.keys[num_blocks:]
        del self.chunks[num_blocks:]
        self.tail = b""

    def fork(self) -> KeyChain:
        """A chain of its own with the same past."""
        child = KeyChain.__new__(KeyChain)
        child.block_size, child.scope, child.root = self.block_size, self.scope, self.root
        child.keys, child.chunks = self.keys.copy(), self.chunks.copy()
        child.tail, child.media = self.tail, self.media
        return child
