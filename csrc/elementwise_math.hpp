// exp and silu over Lanes: one arithmetic for every element, tails included.
#pragma once
#include "lanes.hpp"

namespace pagedkv::PAGEDKV_NS {

// exp by 2^n * e^r, |r| <= ln 2 / 2, and a polynomial of degree 6; about 1 ulp, saturating at the ends.
inline Lanes exp(Lanes x) {
  x = max(min(x, broadcast(88.0f)), broadcast(-87.0f));
  const Lanes n = round_even(mul(x, broadcast(1.44269504f)));
  Lanes r = fma(n, broadcast(-0.693145752f), x);
  r = fma(n, broadcast(-1.42860677e-6f), r);
  Lanes p = broadcast(1.3981999507e-3f);
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(fma(p, r, broadcast(1.0f)), r, broadcast(1.0f));
  return scale(p, n);
}

inline Lanes silu(Lanes x) {
  const Lanes one = broadcast(1.0f);
  return div(x, add(one, exp(sub(zero(), x))));
}

}  // namespace pagedkv::PAGEDKV_NS
