// The only file that knows Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "block.hpp"

namespace nb = nanobind;

NB_MODULE(_native, m) {
  m.def(
      "physical_slot",
      [](const std::vector<int32_t>& table, int64_t position, int64_t block_size) {
        if (block_size < 1) throw nb::value_error("block_size must be at least 1");
        if (position < 0 || position / block_size >= static_cast<int64_t>(table.size()))
          throw nb::index_error("position lies outside the table");
        const auto slot = pagedkv::physical_slot(table.data(), position, block_size);
        return std::pair<int64_t, int64_t>(slot.block, slot.offset);
      },
      nb::arg("table"), nb::arg("position"), nb::arg("block_size"));
}
