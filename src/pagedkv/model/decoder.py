"""One decoder for the Llama, Mistral and Qwen families, as readable as torch allows.

Owns: the maths between token ids and logits. It holds no KV: keys and values go into the pool that the caller passes
and are read back through the block table of the batch. What tells the families apart is data (``ModelConfig``): a
bias here, a norm there, a window.

    token_ids [T] -> embedding -> layers x { x += attention(norm(x));  x += mlp(norm(x)) } -> norm -> hidden [T, hidden]

T is the number of new tokens of all sequences of the batch, one after another; there is no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedkv.attention.backend import AttentionBackend
from pagedkv.attention.batch import AttentionBatch
from pagedkv.model.config import ModelConfig
from pagedkv.model.gguf import QuantisedTensor
from pagedkv.model.layers import RotaryTable, rms_norm, rotate, silu
from pagedkv.model.linear import Linear, make_linear
from pagedkv.model.weights import LayerWeights, ModelWeights, Weight

Progress = Callable[[int, int], None]  # bytes of weights taken, bytes in all


class KVStore(Protocol):
    """Where keys and values live, by layer: ``KVPool`` and ``PagedKVCache`` are such stores."""

    @property
    def k_pool(self) -> Sequence[Tensor]: ...

    @property
    def v_pool(self) -> Sequence[Tensor]: ...

    @property
    def k_scale(self) -> Sequence[Tensor | None]: ...

    @property
    def v_scale(self) -> Sequence[Tensor | None]: ...


class LanguageModel(Protocol):
    """What runs a model: ``Decoder`` below, or ``NativeDecoder`` (``native.py``), which does the same in one call."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    exact: bool
    nbytes: int

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: KVStore, rows: Tensor | None = None) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Decoder:
    """Weights packed for one device and dtype, and the forward pass over them.

    exact: every product and the attention give a token the same bits whatever it is batched with.
    nbytes: what the packed weights take.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        attention: AttentionBackend,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        product: str = "auto",
        progress: Progress | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self._attention = attention
        self._rotary = RotaryTable(config.rope, self.device)
        pack = _Packer(weights.nbytes, self.device, dtype, product, progress)
        self._embedding = pack.plain(weights.embedding)
        self._layers = [
            DecoderLayer(config, layer, window, pack)
            for layer, window in zip(weights.layers, config.layer_windows, strict=True)
        ]
        self._final_norm = pack.plain(weights.final_norm)
        head = self._embedding if weights.head is None else pack.plain(weights.head)
        self._head = make_linear(head, dtype=dtype, backend=product)
        self.exact = attention.exact and self._head.exact and all(layer.exact for layer in self._layers)
        self.nbytes = self._embedding.nbytes + self._head.nbytes + sum(layer.nbytes for layer in self._layers)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: KVStore, rows: Tensor | None = None) -> Tensor:
        """Hidden states [T, hidden] after the final norm, of token_ids int64 [T]; their KV is written into ``kv``.

        rows: int64 [R], ascending; then [R, hidden] of these tokens alone comes back.
        """
        cos_sin = self._rotary.at(batch.positions, batch.max_seq_len)
        hidden = F.embedding(token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            hidden = hidden + layer.attend(hidden, cos_sin, batch, kv, index, self._attention)
            hidden = hidden + layer.mlp(hidden)
        return rms_norm(hidden if rows is None else hidden[rows], self._final_norm, self.config.rms_norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, vocab_size] of hidden [R, hidden]: pass only the rows whose next token is wanted."""
        return self._head(hidden).float()


class DecoderLayer:
    """Attention and gated MLP of one layer."""

    def __init__(self, config: ModelConfig, weights: LayerWeights, window: int | None, pack: _Packer) -> None:
        self._heads, self._kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._eps, self._window = config.rms_norm_eps, window
        self._input_norm = pack.plain(weights.input_norm)
        self._q = pack.linear(weights.q, weights.q_bias)
        self._k = pack.linear(weights.k, weights.k_bias)
        self._v = pack.linear(weights.v, weights.v_bias)
        self._o = pack.linear(weights.o, weights.o_bias)
        self._q_norm = None if weights.q_norm is None else pack.plain(weights.q_norm)
        self._k_norm = None if weights.k_norm is None else pack.plain(weights.k_norm)
        self._post_norm = pack.plain(weights.post_norm)
        self._gate = pack.linear(weights.gate, weights.gate_bias)
        self._up = pack.linear(weights.up, weights.up_bias)
        self._down = pack.linear(weights.down, weights.down_bias)
        products = (self._q, self._k, self._v, self._o, self._gate, self._up, self._down)
        self.exact = all(product.exact for product in products)
        self.nbytes = sum(product.nbytes for product in products)

    def attend(
        self,
        hidden: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        kv: KVStore,
        index: int,
        attention: AttentionBackend,
    ) -> Tensor:
        """[T, hidden] of hidden [T, hidden]. The new keys and values are in the pool before anything reads it."""
        x = rms_norm(hidden, self._input_norm, self._eps)
        q = self._q(x).view(-1, self._heads, self._head_dim)
        k = self._k(x).view(-1, self._kv_heads, self._head_dim)
        v = self._v(x).view(-1, self._kv_heads, self._head_dim)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = rms_norm(q, self._q_norm, self._eps), rms_norm(k, self._k_norm, self._eps)
        q, k = rotate(q, *cos_sin), rotate(k, *cos_sin)
        k_pool, v_pool, k_scale, v_scale = kv.k_pool[index], kv.v_pool[index], kv.k_scale[index], kv.v_scale[index]
        attention.write_kv(k, v, k_pool, v_pool, batch.slot_mapping, k_scale=k_scale, v_scale=v_scale)
        context = attention.paged_attention(
            q,
            k_pool,
            v_pool,
            batch,
            scale=self._head_dim**-0.5,
            window=self._window,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return self._o(context.reshape(-1, self._heads * self._head_dim))

    def mlp(self, hidden: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x)) of the normed x: [T, hidden] -> [T, hidden]."""
        x = rms_norm(hidden, self._post_norm, self._eps)
        return self._down(silu(self._gate(x)) * self._up(x))


class _Packer:
    """Turns weights of a file into what the decoder computes with, and counts them for a progress bar."""

    def __init__(
        self, total: int, device: torch.device, dtype: torch.dtype, product: str, progress: Progress | None
    ) -> None:
        self._total, self._done = total, 0
        self._device, self._dtype, self._product = device, dtype, product
        self._progress = progress

    def plain(self, weight: Weight) -> Tensor:
        """A tensor of its own: the file may be replaced while the model runs, and a view would show it."""
        self._count(weight)
        if isinstance(weight, QuantisedTensor):
            return weight.dequantize().to(self._device, self._dtype)
        return weight.to(self._device, self._dtype, copy=True)

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        return make_linear(self.plain(weight), bias, dtype=self._dtype, backend=self._product)

    def _count(self, weight: Weight) -> None:
        if self._progress is not None:
            self._done = min(self._done + weight.nbytes, self._total)
            self._progress(self._done, self._total)
