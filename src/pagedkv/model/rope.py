"""Rotary position embedding: which frequencies a checkpoint was trained with.

Owns: the meaning of ``rope_scaling`` / ``rope_parameters`` (both spellings) and of GGUF's ``rope.*`` keys.
Guarantees: a kind that is not one of ``KINDS`` is refused by name. Reading on with the plain frequencies would load
without a word and turn long prompts into nonsense.

Sources of the ideas: RoFormer (arXiv 2104.09864); linear interpolation (arXiv 2306.15595); YaRN (arXiv 2309.00071);
llama3: the smoothed interpolation that Meta published with Llama 3.1. The formulas are kept in the order of
operations of transformers, so the float32 results are the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagedkv.errors import UnsupportedModel

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("default", "linear", "llama3", "yarn")

_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_MAY_HAVE = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
_SPELLINGS = ("type", "rope_type", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True)
class RopeConfig:
    """theta: the base; dim: rotated width of a head, even; kind and parameters: the scaling.

    factors: GGUF's ``rope_freqs.weight``, one divisor per frequency (float32 values), which holds the llama3 scaling
    already worked out; only with kind "default".
    """

    theta: float
    dim: int
    kind: str = "default"
    parameters: Mapping[str, float] = field(default_factory=dict)
    factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnsupportedModel(f"rope type {self.kind!r} is not supported; there are {', '.join(KINDS)}")
        if self.theta <= 0 or not math.isfinite(self.theta):
            raise UnsupportedModel(f"rope_theta must be a positive number, not {self.theta}")
        if self.dim <= 0 or self.dim % 2:
            raise UnsupportedModel(f"rotary embedding needs an even head width, not {self.dim}")
        if self.factors is not None and len(self.factors) != self.dim // 2:
            raise UnsupportedModel(f"{len(self.factors)} rope factors for {self.dim // 2} frequencies")
        for name in _NEEDS[self.kind]:
            value = self.parameters.get(name)
            if not isinstance(value, (int, float)) or not value > 0:
                raise UnsupportedModel(f"rope type {self.kind!r} needs a positive {name}, not {value}")

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied with (YaRN's temperature); 1 for the other kinds."""
        if self.kind != "yarn":
            return 1.0
        p = self.parameters
        if p.get("attention_factor") is not None:
            return float(p["attention_factor"])
        if p.get("mscale") and p.get("mscale_all_dim"):
            return _mscale(p["factor"], p["mscale"]) / _mscale(p["factor"], p["mscale_all_dim"])
        return _mscale(p["factor"], 1.0)

    def inv_freq(self) -> Tensor:
        """Radians per position of each pair of features: float32 [dim / 2], on the CPU."""
        import torch

        exponents = torch.arange(0, self.dim, 2, dtype=torch.int64).float() / self.dim
        plain = 1.0 / (self.theta**exponents)
        if self.factors is not None:
            return plain / torch.tensor(self.factors, dtype=torch.float32)
        if self.kind == "linear":
            return plain / self.parameters["factor"]
        if self.kind == "llama3":
            return self._llama3(plain)
        if self.kind == "yarn":
            return self._yarn(self.theta**exponents)
        return plain

    def _llama3(self, plain: Tensor) -> Tensor:
        """Long waves are stretched by ``factor``, short ones kept, those between blended."""
        import torch

        p = self.parameters
        context = p["original_max_position_embeddings"]
        longest, shortest = context / p["low_freq_factor"], context / p["high_freq_factor"]
        wavelength = 2 * math.pi / plain
        scaled = torch.where(wavelength > longest, plain / p["factor"], plain)
        share = (context / wavelength - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
        blended = (1 - share) * scaled / p["factor"] + share * scaled
        between = (wavelength >= shortest) & (wavelength <= longest)
        return torch.where(between, blended, scaled)

    def _yarn(self, periods: Tensor) -> Tensor:
        """Interpolate slow features, keep fast ones, and ramp between two feature indices."""
        import torch

        p = self.parameters
        context, half = p["original_max_position_embeddings"], self.dim // 2

        def feature_at(rotations: float) -> float:
            return (self.dim * math.log(context / (rotations * 2 * math.pi))) / (2 * math.log(self.theta))

        low, high = feature_at(p.get("beta_fast") or 32), feature_at(p.get("beta_slow") or 1)
        if p.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001  # a step in place of a ramp, without dividing by zero
        ramp = torch.clamp((torch.arange(half, dtype=torch.float32) - low) / (high - low), 0, 1)
        keep = 1 - ramp
        return 1.0 / (p["factor"] * periods) * (1 - keep) + 1.0 / periods * keep


def rope_from_json(config: Mapping[str, Any], *, dim: int, max_position_embeddings: int) -> RopeConfig:
    """Read ``rope_theta`` with ``rope_scaling`` or ``rope_parameters`` of a config.json.

    Raises UnsupportedModel for an unknown kind, a field that the kind does not have (it would be ignored in silence),
    parameters per layer type, partial rotation and multimodal sections.
    """
    spelled = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in spelled.values()):
        raise UnsupportedModel(f"rope parameters per layer type are not supported: {sorted(spelled)}")
    kind = spelled.get("rope_type", spelled.get("type", "default"))
    if kind not in KINDS:
        raise UnsupportedModel(f"rope type {kind!r} is not supported; there are {', '.join(KINDS)}")
    partial = spelled.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is not None and partial != 1:
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported, only whole heads are rotated")
    theta = spelled.get("rope_theta", config.get("rope_theta", 10_000.0))
    parameters = {name: value for name, value in spelled.items() if name not in _SPELLINGS and value is not None}
    if kind in ("llama3", "yarn"):
        outside = config.get("original_max_position_embeddings")
        if outside is not None:
            parameters["original_max_position_embeddings"] = outside
        parameters.setdefault("original_max_position_embeddings", max_position_embeddings)
        if kind == "yarn" and "factor" not in parameters:
            parameters["factor"] = max_position_embeddings / parameters["original_max_position_embeddings"]
    known = (*_NEEDS[kind], *_MAY_HAVE.get(kind, ()))
    unknown = sorted(set(parameters) - set(known) - {"original_max_position_embeddings"})
    if unknown:
        raise UnsupportedModel(f"rope type {kind!r} has no field {', '.join(unknown)}")
    return RopeConfig(float(theta), dim, kind, parameters)


def rope_from_gguf(
    metadata: Mapping[str, Any], architecture: str, *, dim: int, max_position_embeddings: int
) -> RopeConfig:
    """Read ``{architecture}.rope.*``; the llama3 factors are a tensor and are added where the weights are read."""

    def value(name: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.rope.{name}", default)

    rotated = value("dimension_count", dim)
    if rotated != dim:
        raise UnsupportedModel(f"{architecture}.rope.dimension_count {rotated} is not the head width {dim}")
    theta = float(value("freq_base", 10_000.0))
    kind = value("scaling.type", "none")
    old_linear = value("scale_linear")
    if kind == "none" and old_linear not in (None, 1.0):
        kind = "linear"
    if kind == "none":
        return RopeConfig(theta, dim)
    parameters = {"factor": float(value("scaling.factor", old_linear or 0.0))}
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = value(
            "scaling.original_context_length", max_position_embeddings
        )
        if value("scaling.attn_factor") is not None:
            # llama.cpp multiplies the temperature by this factor
            parameters["attention_factor"] = value("scaling.attn_factor") * _mscale(parameters["factor"], 1.0)
        for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if value(f"scaling.{theirs}") is not None:
                parameters[ours] = float(value(f"scaling.{theirs}"))
        for name, neutral in (("yarn_log_multiplier", ()), ("yarn_ext_factor", (1, -1)), ("yarn_attn_factor", (1,))):
            if value(f"scaling.{name}") not in (None, *neutral):
                raise UnsupportedModel(f"{architecture}.rope.scaling.{name} is not supported")
    return RopeConfig(theta, dim, kind, parameters)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
