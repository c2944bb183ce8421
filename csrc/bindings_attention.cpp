// Attention for Python. Tensors come as addresses and strides, because building a tensor view on this side costs
// microseconds each; attention/native.py has checked shapes and dtypes, the plan checks lengths and block ids.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>

#include <array>

#include "attention.hpp"

namespace nb = nanobind;
using namespace pagedkv;

namespace {

using Rows = std::array<int64_t, 4>;  // address, dtype, token stride, head stride
using Pool = std::array<int64_t, 8>;  // address, block, head and slot stride; the same of its scales

RowsView rows_view(const Rows& r) { return {reinterpret_cast<void*>(r[0]), static_cast<DType>(r[1]), r[2], r[3]}; }

PoolView pool_view(const Pool& p) {
  return {reinterpret_cast<void*>(p[0]), p[1], p[2], p[3], reinterpret_cast<float*>(p[4]), p[5], p[6], p[7]};
}

void build_plan(AttentionPlan& plan, const std::array<int64_t, 3>& addresses, const std::array<int64_t, 8>& sizes) {
  const nb::gil_scoped_release release;
  plan.build({static_cast<int32_t>(sizes[0]), reinterpret_cast<const int32_t*>(addresses[0]),
              reinterpret_cast<const int32_t*>(addresses[1]), reinterpret_cast<const int32_t*>(addresses[2]), sizes[1],
              static_cast<int32_t>(sizes[2]), sizes[3], static_cast<int32_t>(sizes[4]),
              static_cast<int32_t>(sizes[5]), static_cast<int32_t>(sizes[6]), static_cast<int32_t>(sizes[7])});
}

void run_attention(const AttentionPlan& plan, const Rows& q, const Rows& out, const Pool& k, const Pool& v, int kv_dtype,
         float scale, float softcap, int64_t sinks) {
  const nb::gil_scoped_release release;
  attention(plan, {rows_view(q), rows_view(out), pool_view(k), pool_view(v), static_cast<DType>(kv_dtype), scale,
                   softcap, reinterpret_cast<const float*>(sinks)});
}

void run_write(const Rows& k, const Rows& v, const Pool& k_pool, const Pool& v_pool, int kv_dtype,
           const std::array<int64_t, 6>& sizes) {
  const nb::gil_scoped_release release;
  write_kv({rows_view(k), rows_view(v), pool_view(k_pool), pool_view(v_pool), static_cast<DType>(kv_dtype),
            reinterpret_cast<const int64_t*>(sizes[0]), sizes[1], sizes[2] * sizes[3], static_cast<int32_t>(sizes[3]),
            static_cast<int32_t>(sizes[4]), static_cast<int32_t>(sizes[5])});
}

}  // namespace

void register_attention(nb::module_& m) {
  m.attr("max_head_dim") = kMaxHeadDim;
  m.attr("tile") = kTile;
  m.attr("piece") = kPiece;
  nb::class_<AttentionPlan>(m, "AttentionPlan")
      .def(nb::init<>())
      .def("build", &build_plan, nb::arg("addresses"), nb::arg("sizes"),
           "addresses of query_start, seq_lens, block_table; sizes: sequences, table width, block_size, num_blocks, "
           "heads, KV heads, head_dim, window (0: none)")
      .def_prop_ro("num_items", [](const AttentionPlan& p) { return p.items.size(); })
      .def_prop_ro("num_tiles", [](const AttentionPlan& p) { return p.tiles.size(); })
      .def_prop_ro("num_split_tokens", [](const AttentionPlan& p) { return p.split_tokens.size(); })
      .def_prop_ro("num_partials", [](const AttentionPlan& p) { return p.num_partials; });
  m.def("attention", &run_attention, nb::arg("plan"), nb::arg("q"), nb::arg("out"), nb::arg("k"), nb::arg("v"),
        nb::arg("kv_dtype"), nb::arg("scale"), nb::arg("softcap"), nb::arg("sinks"));
  m.def(
      "read_stream",
      [](int64_t address, int64_t nbytes) {
        const nb::gil_scoped_release release;
        return read_stream(reinterpret_cast<const float*>(address), nbytes / 4);
      },
      nb::arg("address"), nb::arg("nbytes"), "read memory as fast as it goes, for measuring");
  m.def("write_kv", &run_write, nb::arg("k"), nb::arg("v"), nb::arg("k_pool"), nb::arg("v_pool"), nb::arg("kv_dtype"),
        nb::arg("sizes"));
}
