// pagedkv._cache: block keys, for cache/keys.py.
#include <cstring>
#include <vector>

#include "bindings_cache.hpp"
#include "sha256.hpp"

namespace nb = nanobind;

namespace {

void put_number(uint8_t* at, uint32_t number) {
  for (int i = 0; i < 4; ++i) at[i] = uint8_t(number >> (8 * i));
}

nb::bytes digest(nb::bytes message, bool portable) {
  uint8_t out[32];
  const auto* data = reinterpret_cast<const uint8_t*>(message.c_str());
  (portable ? pagedkv::sha256_portable : pagedkv::sha256)(data, message.size(), out);
  return nb::bytes(reinterpret_cast<const char*>(out), sizeof out);
}

// The ids of a list as 32-bit little-endian numbers; None where one of them is no integer from 0 to 2**32 - 1.
nb::object pack_tokens(nb::list tokens) {
  const Py_ssize_t count = PyList_Size(tokens.ptr());
  nb::object packed = nb::steal(PyBytes_FromStringAndSize(nullptr, 4 * count));
  if (!packed.is_valid()) nb::raise_python_error();
  auto* to = reinterpret_cast<uint8_t*>(PyBytes_AsString(packed.ptr()));
  for (Py_ssize_t i = 0; i < count; ++i, to += 4) {
    PyObject* token = PyList_GetItem(tokens.ptr(), i);
    nb::object index;  // what is no int may know its integer (numpy's)
    if (!PyLong_Check(token)) {
      index = nb::steal(PyNumber_Index(token));
      token = index.ptr();
    }
    const unsigned long long id = token == nullptr ? ~0ull : PyLong_AsUnsignedLongLong(token);
    if (id > 0xffffffff) {  // a failed conversion gives 2**64 - 1
      PyErr_Clear();
      return nb::none();
    }
    put_number(to, uint32_t(id));
  }
  return packed;
}

// The keys of the full blocks in data (width bytes each) that follow the key parent, and the blocks as bytes.
//     message of a block = 'P' length parent 'T' length tokens
nb::tuple chain_blocks(nb::bytes parent, nb::bytes data, size_t width) {
  if (parent.size() != 32) throw nb::value_error("a key has 32 bytes");
  if (width == 0) throw nb::value_error("a block has at least one byte");
  constexpr size_t kTokens = 42;
  std::vector<uint8_t> message(kTokens + width);
  uint8_t* const key = message.data() + 5;
  message[0] = 'P';
  put_number(message.data() + 1, 32);
  message[37] = 'T';
  put_number(message.data() + 38, width);
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

NB_MODULE(_cache, m) {
  m.doc() = "block keys, and the loops over blocks of pagedkv.cache";
  m.attr("sources") = PAGEDKV_SOURCES;
  m.def("pack_tokens", &pack_tokens);
  m.def("chain_blocks", &chain_blocks, nb::arg("parent"), nb::arg("data"), nb::arg("width"));
  m.def("digest", &digest, nb::arg("message"), nb::arg("portable") = false);
  m.def("in_hardware", &pagedkv::sha256_in_hardware);
  bind_loops(m);
}
