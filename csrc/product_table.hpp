// The table of one instruction set; included last by each product_<isa>.cpp.
#pragma once
#include "product_groups.hpp"
#include "product_kernel.hpp"

namespace pagedkv::PAGEDKV_NS {

constexpr ProductKernels kProducts = {{
    multiply<Dense<float>>,
    multiply<Dense<uint16_t>>,
    multiply<Groups<WeightKind::int4>>,
    multiply<Groups<WeightKind::int4_offset>>,
    multiply<Groups<WeightKind::int8>>,
}};

}  // namespace pagedkv::PAGEDKV_NS
