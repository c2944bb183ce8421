// pagedkv._keys: block keys for cache/keys.py. A module of its own, since it needs neither torch nor threads and the
// cache loads neither.
#include <nanobind/nanobind.h>

#include <cstring>
#include <vector>

#include "sha256.hpp"

namespace nb = nanobind;

namespace {

void put_length(uint8_t* at, size_t length) {
  for (int i = 0; i < 4; ++i) at[i] = uint8_t(length >> (8 * i));
}

nb::bytes digest(nb::bytes message, bool portable) {
  uint8_t out[32];
  const auto* data = reinterpret_cast<const uint8_t*>(message.c_str());
  (portable ? pagedkv::sha256_portable : pagedkv::sha256)(data, message.size(), out);
  return nb::bytes(reinterpret_cast<const char*>(out), sizeof out);
}

// The keys of the full blocks in data (width bytes each) that follow the key parent, and the blocks as bytes.
//     message of a block = 'P' length parent 'T' length tokens
nb::tuple chain_keys(nb::bytes parent, nb::bytes data, size_t width) {
  if (parent.size() != 32) throw nb::value_error("a key has 32 bytes");
  if (width == 0) throw nb::value_error("a block has at least one byte");
  constexpr size_t kTokens = 42;
  std::vector<uint8_t> message(kTokens + width);
  uint8_t* const key = message.data() + 5;
  message[0] = 'P';
  put_length(message.data() + 1, 32);
  message[37] = 'T';
  put_length(message.data() + 38, width);
  std::memcpy(key, parent.c_str(), 32);
  const auto blocks = static_cast<Py_ssize_t>(data.size() / width);
  const char* tokens = data.c_str();
  nb::list keys = nb::steal<nb::list>(PyList_New(blocks)), chunks = nb::steal<nb::list>(PyList_New(blocks));
  if (!keys.is_valid() || !chunks.is_valid()) nb::raise_python_error();
  for (Py_ssize_t i = 0; i < blocks; ++i, tokens += width) {
    std::memcpy(message.data() + kTokens, tokens, width);
    pagedkv::sha256(message.data(), message.size(), key);
    PyList_SetItem(keys.ptr(), i, nb::bytes(reinterpret_cast<const char*>(key), 32).release().ptr());
    PyList_SetItem(chunks.ptr(), i, nb::bytes(tokens, width).release().ptr());
  }
  return nb::make_tuple(std::move(keys), std::move(chunks));
}

}  // namespace

NB_MODULE(_keys, m) {
  m.doc() = "SHA-256 chains over blocks of tokens";
  m.def("chain_keys", &chain_keys, nb::arg("parent"), nb::arg("data"), nb::arg("width"));
  m.def("digest", &digest, nb::arg("message"), nb::arg("portable") = false);
  m.def("in_hardware", &pagedkv::sha256_in_hardware);
}
