// Packed products and the decoder for Python. Tensors come as addresses; model/native.py and model/linear.py have
// checked dtypes, shapes and density.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <array>

#include "decoder.hpp"
#include "elementwise.hpp"

namespace nb = nanobind;
using namespace pagedkv;

namespace {

using Pool = std::array<int64_t, 8>;  // address, block, head and slot stride; the same of its scales

template <typename T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(address);
}

PoolView pool_view(const Pool& p) { return {at<void>(p[0]), p[1], p[2], p[3], at<float>(p[4]), p[5], p[6], p[7]}; }

void put_dense(PackedWeight& packed, int64_t source, int dtype, int64_t rows, int place, int64_t first) {
  const nb::gil_scoped_release release;
  packed.put_dense(at<void>(source), static_cast<DType>(dtype), rows, static_cast<Place>(place), first);
}

void put_groups(PackedWeight& packed, const std::array<int64_t, 3>& addresses, int64_t rows, int place, int64_t first) {
  const nb::gil_scoped_release release;
  packed.put_groups(at<uint8_t>(addresses[0]), at<uint16_t>(addresses[1]), at<uint16_t>(addresses[2]), rows,
                    static_cast<Place>(place), first);
}

// x: address, stride, rows; out: address, stride, columns, is bf16
void run_product(const PackedWeight& packed, const std::array<int64_t, 3>& x, const std::array<int64_t, 4>& out,
                 int64_t bias, int tail, int threads) {
  const nb::gil_scoped_release release;
  multiply({at<void>(x[0]), x[1], x[2], packed.weight(),
            {static_cast<TailKind>(tail), at<float>(bias), at<void>(out[0]), out[1], static_cast<int32_t>(out[2]),
             out[3] != 0}},
           threads);
}

void read_columns(const PackedWeight& packed, int64_t ids, int64_t count, int64_t out) {
  const nb::gil_scoped_release release;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t column = at<int64_t>(ids)[i];
    if (column < 0 || column >= packed.weight().columns) throw std::invalid_argument("a row outside the weight");
    read_column(packed.weight(), column, at<float>(out) + i * packed.weight().depth);
  }
}

void rms_norm(const std::array<int64_t, 2>& shape, int64_t x, int64_t weight, float eps, int64_t out, bool bf16) {
  for (int64_t row = 0; row < shape[0]; ++row)
    elementwise_kernels().rms_norm(at<float>(x) + row * shape[1], at<float>(weight), eps, shape[1],
                                   at<char>(out) + row * shape[1] * (bf16 ? 2 : 4), bf16);
}

void rotate(const std::array<int64_t, 3>& shape, int64_t x, int64_t cos, int64_t sin, int64_t norm, float eps) {
  const auto heads = static_cast<int32_t>(shape[1]), width = static_cast<int32_t>(shape[2]);
  for (int64_t t = 0; t < shape[0]; ++t)
    elementwise_kernels().rotate(at<float>(x) + t * heads * width,
                                 {at<float>(cos) + t * (width / 2), at<float>(sin) + t * (width / 2), at<float>(norm),
                                  eps, heads, width});
}

// weights: qkv, o, gate_up, down; vectors: input, post, q and k norm, then the biases in the order of the weights
void add_layer(Decoder& decoder, const std::vector<std::shared_ptr<PackedWeight>>& weights,
               std::vector<Vector> vectors, int32_t window) {
  decoder.add_layer({std::move(vectors.at(0)), std::move(vectors.at(1)), std::move(vectors.at(2)),
                     std::move(vectors.at(3)), weights.at(0), weights.at(1), weights.at(2), weights.at(3),
                     std::move(vectors.at(4)), std::move(vectors.at(5)), std::move(vectors.at(6)),
                     std::move(vectors.at(7)), window});
}

LayerPools layer_pools(const std::vector<Pool>& k, const std::vector<Pool>& v, int dtype, int64_t num_blocks,
                       int32_t block_size) {
  LayerPools pools{{}, {}, static_cast<DType>(dtype), num_blocks, block_size};
  for (const Pool& pool : k) pools.k.push_back(pool_view(pool));
  for (const Pool& pool : v) pools.v.push_back(pool_view(pool));
  return pools;
}

// tensors: token_ids, positions, slot_mapping, query_start, seq_lens, block_table, cos, sin, rows, hidden;
// sizes: tokens, sequences, table width, rotary positions, rows, threads
void forward(Decoder& decoder, const LayerPools& pools, const std::array<int64_t, 10>& tensors,
             const std::array<int64_t, 6>& sizes) {
  const nb::gil_scoped_release release;
  decoder.forward({at<int64_t>(tensors[0]), at<int64_t>(tensors[1]), at<int64_t>(tensors[2]), sizes[0],
                   static_cast<int32_t>(sizes[1]), at<int32_t>(tensors[3]), at<int32_t>(tensors[4]),
                   at<int32_t>(tensors[5]), sizes[2], at<float>(tensors[6]), at<float>(tensors[7]), sizes[3],
                   at<int64_t>(tensors[8]), sizes[4], at<void>(tensors[9])},
                  pools, static_cast<int>(sizes[5]));
}

void logits(Decoder& decoder, int64_t hidden, int64_t rows, int64_t out, int threads) {
  const nb::gil_scoped_release release;
  decoder.logits(at<void>(hidden), rows, at<float>(out), threads);
}

}  // namespace

void register_product(nb::module_& m) {
  nb::class_<WeightArena>(m, "WeightArena").def(nb::init<>());
  nb::class_<PackedWeight>(m, "PackedWeight")
      .def("__init__",
           [](PackedWeight* self, std::shared_ptr<WeightArena> arena, int kind, int64_t columns, int64_t depth) {
             new (self) PackedWeight(std::move(arena), static_cast<WeightKind>(kind), columns, depth);
           },
           nb::arg("arena"), nb::arg("kind"), nb::arg("columns"), nb::arg("depth"))
      .def_prop_ro("nbytes", [](const PackedWeight& packed) { return packed.weight().bytes(); })
      .def("put_dense", &put_dense, nb::arg("source"), nb::arg("dtype"), nb::arg("rows"), nb::arg("place"),
           nb::arg("first"))
      .def("put_groups", &put_groups, nb::arg("addresses"), nb::arg("rows"), nb::arg("place"), nb::arg("first"),
           "addresses of values, factors, offsets (0: none)")
      .def("multiply", &run_product, nb::arg("x"), nb::arg("out"), nb::arg("bias"), nb::arg("tail"),
           nb::arg("threads"))
      .def("read_columns", &read_columns, nb::arg("ids"), nb::arg("count"), nb::arg("out"));
  m.def("rms_norm", &rms_norm, nb::arg("shape"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("out"),
        nb::arg("bf16"));
  m.def("rotate", &rotate, nb::arg("shape"), nb::arg("x"), nb::arg("cos"), nb::arg("sin"), nb::arg("norm"),
        nb::arg("eps"));
  nb::class_<LayerPools>(m, "LayerPools")
      .def("__init__",
           [](LayerPools* self, const std::vector<Pool>& k, const std::vector<Pool>& v, int dtype, int64_t num_blocks,
              int32_t block_size) { new (self) LayerPools(layer_pools(k, v, dtype, num_blocks, block_size)); },
           nb::arg("k"), nb::arg("v"), nb::arg("dtype"), nb::arg("num_blocks"), nb::arg("block_size"));
  nb::class_<Decoder>(m, "Decoder")
      .def("__init__",
           [](Decoder* self, const std::array<int32_t, 5>& shape, float eps, bool bf16,
              std::shared_ptr<PackedWeight> embedding, std::shared_ptr<PackedWeight> head, Vector final_norm) {
             new (self) Decoder({shape[0], shape[1], shape[2], shape[3], shape[4], eps, bf16}, std::move(embedding),
                                std::move(head), std::move(final_norm));
           },
           nb::arg("shape"), nb::arg("eps"), nb::arg("bf16"), nb::arg("embedding"), nb::arg("head"),
           nb::arg("final_norm"), "shape: hidden, heads, KV heads, head_dim, intermediate")
      .def("add_layer", &add_layer, nb::arg("weights"), nb::arg("vectors"), nb::arg("window"))
      .def("forward", &forward, nb::arg("pools"), nb::arg("tensors"), nb::arg("sizes"))
      .def("logits", &logits, nb::arg("hidden"), nb::arg("rows"), nb::arg("out"), nb::arg("threads"));
}
