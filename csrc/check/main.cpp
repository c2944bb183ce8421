#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "../isa.hpp"
#include "check.hpp"

// Without arguments every instruction set of this processor; else those named.
int main(int argc, char** argv) {
  const auto wanted = [&](const char* name) {
    for (int i = 1; i < argc; ++i)
      if (std::strcmp(argv[i], name) == 0) return true;
    return argc == 1;
  };
  int failures = 0;
  for (pagedkv::Isa isa : {pagedkv::Isa::generic, pagedkv::Isa::neon, pagedkv::Isa::avx2, pagedkv::Isa::avx512,
                           pagedkv::Isa::avx512bf16}) {
    if (!pagedkv::isa_available(isa) || !wanted(pagedkv::isa_name(isa))) continue;
    pagedkv::force_isa(pagedkv::isa_name(isa));
    std::printf("%s\n", pagedkv::isa_name(isa));
    failures += check_attention();
    failures += check_product();
  }
  std::printf(failures == 0 ? "all checks passed\n" : "%d checks FAILED\n", failures);
  return failures == 0 ? 0 : 1;
}
