// The Python module. Each topic registers its functions from a bindings_<topic>.cpp of its own.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "block.hpp"
#include "isa.hpp"

namespace nb = nanobind;

void register_attention(nb::module_& m);
void register_product(nb::module_& m);

namespace {

std::pair<int64_t, int64_t> physical_slot(const std::vector<int32_t>& table, int64_t position, int64_t block_size) {
  if (block_size < 1) throw nb::value_error("block_size must be at least 1");
  if (position < 0 || position / block_size >= static_cast<int64_t>(table.size()))
    throw nb::index_error("position lies outside the table");
  const pagedkv::Slot slot = pagedkv::physical_slot(table.data(), position, block_size);
  return {slot.block, slot.offset};
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (pagedkv::Isa isa : {pagedkv::Isa::generic, pagedkv::Isa::neon, pagedkv::Isa::avx2, pagedkv::Isa::avx512,
                           pagedkv::Isa::avx512bf16})
    if (pagedkv::isa_available(isa)) names.push_back(pagedkv::isa_name(isa));
  return names;
}

}  // namespace

NB_MODULE(_native, m) {
  m.attr("sources") = PAGEDKV_SOURCES;
  m.def("physical_slot", &physical_slot, nb::arg("table"), nb::arg("position"), nb::arg("block_size"));
  m.def("instruction_sets", &instruction_sets, "what this processor has, slowest first");
  m.def("instruction_set", [] { return std::string(pagedkv::isa_name(pagedkv::isa())); });
  m.def("force_instruction_set", [](const std::string& name) { pagedkv::force_isa(name.c_str()); }, nb::arg("name"),
        "for tests; an empty name returns to the choice by cpuid");
  register_attention(m);
  register_product(m);
}
