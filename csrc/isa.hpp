// Which instruction set the kernels use: chosen once by cpuid; PAGEDKV_ISA forces one.
//
// The pattern that every kernel follows:
//   topic.hpp          the call as the rest of csrc sees it: plain structs, raw pointers, strides
//   topic.cpp          plain C++: checks, work split, the OpenMP region, and `const TopicKernels& topic_kernels()`
//   topic_kernel.hpp   the kernel over the vectors of simd_*.hpp (or lanes.hpp: sixteen lanes whatever a vector
//                      holds), inside `namespace pagedkv::PAGEDKV_NS`
//   topic_<isa>.cpp    three lines: the flags' simd header, the template, `extern const TopicKernels topic_<isa>`
// A file that is compiled for one instruction set keeps everything it instantiates in its own namespace and uses no
// inline function of the standard library, so that the linker cannot merge its code into the generic build.
#pragma once

namespace pagedkv {

enum class Isa { generic, neon, avx2, avx512, avx512bf16 };

// The instruction set in use. Throws std::runtime_error when PAGEDKV_ISA names one that is unknown or not here.
Isa isa();
const char* isa_name(Isa isa);
bool isa_available(Isa isa);
// Choose by name, for tests; nullptr or "" returns to the choice by cpuid. Throws std::runtime_error.
void force_isa(const char* name);

// Whether a prefetch from memory should go into the first level of the cache, not the second. Zen 4 (32 KiB) fetches
// half as fast into the first level, Zen 5 (48 KiB) an eighth faster; the size tells such processors apart.
bool prefetches_near();

}  // namespace pagedkv
