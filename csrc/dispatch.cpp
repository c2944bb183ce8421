#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "isa.hpp"

namespace pagedkv {
namespace {

constexpr Isa kAll[] = {Isa::avx512bf16, Isa::avx512, Isa::avx2, Isa::neon, Isa::generic};  // fastest first

Isa find(const char* name) {
  std::string known;
  for (Isa candidate : kAll) {
    if (std::strcmp(name, isa_name(candidate)) == 0) {
      if (isa_available(candidate)) return candidate;
      throw std::runtime_error(std::string("instruction set '") + name + "' is not available on this processor");
    }
    known += std::string(known.empty() ? "" : ", ") + isa_name(candidate);
  }
  throw std::runtime_error(std::string("instruction set '") + name + "' is unknown; there are " + known);
}

Isa detect() {
  const char* forced = std::getenv("PAGEDKV_ISA");
  if (forced != nullptr && *forced != '\0') return find(forced);
  for (Isa candidate : kAll)
    if (isa_available(candidate)) return candidate;
  return Isa::generic;
}

std::atomic<int> chosen{-1};

}  // namespace

Isa isa() {
  int now = chosen.load(std::memory_order_relaxed);
  if (now < 0) {
    now = static_cast<int>(detect());
    chosen.store(now, std::memory_order_relaxed);
  }
  return static_cast<Isa>(now);
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::neon: return "neon";
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    case Isa::avx512bf16: return "avx512bf16";
    default: return "generic";
  }
}

bool isa_available(Isa isa) {
  if (isa == Isa::generic) return true;
#if defined(PAGEDKV_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (isa == Isa::avx2) return avx2;
  if (isa == Isa::avx512) return avx512;
  if (isa == Isa::avx512bf16)
    return avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512vnni");
#elif defined(PAGEDKV_ARM64)
  return isa == Isa::neon;
#endif
  return false;
}

bool prefetches_near() {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
  static const bool near = sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 << 10;
  return near;
#else
  return false;
#endif
}

void force_isa(const char* name) {
  chosen.store(name == nullptr || *name == '\0' ? -1 : static_cast<int>(find(name)), std::memory_order_relaxed);
}

}  // namespace pagedkv
