// pagedkv._cache: the loops over blocks that take the time in cache/, on the very lists and dictionaries that Python
// uses. Each has the name, the arguments and the effects of the function marked @native in allocator.py, index.py,
// eviction.py or keys.py, which says what it does; the tests compare the two.
//
// Only functions of the limited API (one binary for every Python from 3.12 on). A list handed in keeps its length
// here. An object of the wrong kind raises what Python raises.
#include "bindings_cache.hpp"

#include <cstring>

namespace nb = nanobind;

namespace {

using List = const nb::list&;

PyObject* checked(PyObject* object) {
  if (object == nullptr) nb::raise_python_error();
  return object;
}

long number(PyObject* object) {
  const long value = PyLong_AsLong(checked(object));
  if (value == -1 && PyErr_Occurred()) nb::raise_python_error();
  return value;
}

Py_ssize_t size(List list) { return PyList_Size(list.ptr()); }

// Borrowed.
PyObject* at(List list, Py_ssize_t index) { return checked(PyList_GetItem(list.ptr(), index)); }

void put(List list, Py_ssize_t index, PyObject* object) {
  Py_IncRef(object);
  if (PyList_SetItem(list.ptr(), index, object) != 0) nb::raise_python_error();
}

void put(List list, Py_ssize_t index, long value) {
  if (PyList_SetItem(list.ptr(), index, checked(PyLong_FromLong(value))) != 0) nb::raise_python_error();
}

void append(List list, PyObject* object) {
  if (PyList_Append(list.ptr(), object) != 0) nb::raise_python_error();
}

// Borrowed; null where the dictionary has no such key.
PyObject* look_up(const nb::dict& dict, PyObject* key) {
  PyObject* found = PyDict_GetItemWithError(dict.ptr(), key);
  if (found == nullptr && PyErr_Occurred()) nb::raise_python_error();
  return found;
}

bool same_number(PyObject* a, PyObject* b) { return a == b || number(a) == number(b); }

bool same_bytes(PyObject* a, PyObject* b) {
  if (a == b) return true;
  char *left, *right;
  Py_ssize_t left_size, right_size;
  if (PyBytes_AsStringAndSize(a, &left, &left_size) != 0 || PyBytes_AsStringAndSize(b, &right, &right_size) != 0)
    nb::raise_python_error();
  return left_size == right_size && std::memcmp(left, right, left_size) == 0;
}

// The counts of the allocator: how many owners each block has, and whether the prefix cache is one of them.
class Counts {
 public:
  Counts(List refs, nb::handle cached) : refs_(refs), blocks_(size(refs)) {
    flags_ = PyByteArray_Check(cached.ptr()) ? PyByteArray_AsString(cached.ptr()) : nullptr;
    if (flags_ == nullptr || PyByteArray_Size(cached.ptr()) != blocks_)
      throw nb::value_error("cached is a bytearray with one flag for each entry of refs");
  }
  bool exists(long block) const { return block >= 0 && block < blocks_; }
  long count(long block) const { return number(at(refs_, block)); }
  void set(long block, long count) { put(refs_, block, count); }
  char& cached(long block) { return flags_[block]; }

 private:
  List refs_;
  Py_ssize_t blocks_;
  char* flags_;
};

nb::tuple add_owner(nb::list refs, nb::object cached, nb::list blocks) {
  Counts counts(refs, cached);
  nb::list idle;
  Py_ssize_t done = 0;
  for (const Py_ssize_t all = size(blocks); done < all; ++done) {
    PyObject* const object = at(blocks, done);
    const long block = number(object);
    if (!counts.exists(block)) break;
    const long owners = counts.count(block);
    if (owners == 0) break;
    counts.set(block, owners + 1);
    if (owners == 1 && counts.cached(block)) append(idle, object);
  }
  return nb::make_tuple(done, std::move(idle));
}

nb::tuple drop_owner(nb::list refs, nb::object cached, nb::list blocks) {
  Counts counts(refs, cached);
  nb::list freed, idle;
  Py_ssize_t done = 0;
  for (const Py_ssize_t all = size(blocks); done < all; ++done) {
    PyObject* const object = at(blocks, done);
    const long block = number(object);
    if (!counts.exists(block)) break;
    const long left = counts.count(block) - 1, kept = counts.cached(block) ? 1 : 0;
    if (left < kept) break;
    counts.set(block, left);
    if (left == 0) append(freed, object);
    if (left == 1 && kept) append(idle, object);
  }
  return nb::make_tuple(done, std::move(freed), std::move(idle));
}

Py_ssize_t add_cache(nb::list refs, nb::object cached, nb::list blocks) {
  Counts counts(refs, cached);
  Py_ssize_t done = 0;
  for (const Py_ssize_t all = size(blocks); done < all; ++done) {
    const long block = number(at(blocks, done));
    if (!counts.exists(block)) break;
    const long owners = counts.count(block);
    if (owners == 0 || counts.cached(block)) break;
    counts.set(block, owners + 1);
    counts.cached(block) = 1;
  }
  return done;
}

nb::tuple drop_cache(nb::list refs, nb::object cached, nb::list blocks) {
  Counts counts(refs, cached);
  nb::list freed;
  Py_ssize_t done = 0;
  for (const Py_ssize_t all = size(blocks); done < all; ++done) {
    PyObject* const object = at(blocks, done);
    const long block = number(object);
    if (!counts.exists(block) || !counts.cached(block)) break;
    const long left = counts.count(block) - 1;
    counts.set(block, left);
    counts.cached(block) = 0;
    if (left == 0) append(freed, object);
  }
  return nb::make_tuple(done, std::move(freed));
}

nb::list follow(nb::dict by_key, nb::list parents, nb::list tokens, nb::list keys, nb::list chunks, nb::int_ node,
                Py_ssize_t most) {
  nb::list found;
  PyObject* parent = node.ptr();
  if (most > size(keys)) most = size(keys);
  for (Py_ssize_t i = 0; i < most; ++i) {
    PyObject* const object = look_up(by_key, at(keys, i));
    if (object == nullptr) break;
    const long block = number(object);
    if (!same_number(at(parents, block), parent) || !same_bytes(at(tokens, block), at(chunks, i))) break;
    append(found, object);
    parent = object;
  }
  return found;
}

void link_blocks(nb::list keys, nb::list tokens, nb::list parents, nb::list child_of, nb::list blocks,
                 nb::list run_keys, nb::list chunks, nb::int_ parent) {
  PyObject* previous = parent.ptr();
  long before = -1;
  for (Py_ssize_t i = 0, all = size(blocks); i < all; ++i) {
    PyObject* const object = at(blocks, i);
    const long block = number(object);
    put(keys, block, at(run_keys, i));
    put(tokens, block, at(chunks, i));
    put(parents, block, previous);
    if (i) put(child_of, before, object);
    previous = object;
    before = block;
  }
}

void move_hits(const nb::dict& hits, PyObject* from, PyObject* to) {
  PyObject* const moved = look_up(hits, from);
  if (moved == nullptr) return;
  PyObject* const present = look_up(hits, to);
  const nb::object sum = nb::steal(PyLong_FromLong(number(moved) + (present == nullptr ? 0 : number(present))));
  if (!sum.is_valid() || PyDict_SetItem(hits.ptr(), to, sum.ptr()) != 0 || PyDict_DelItem(hits.ptr(), from) != 0)
    nb::raise_python_error();
}

Py_ssize_t unlink_blocks(nb::dict by_key, nb::list keys, nb::list tokens, nb::list parents, nb::list child_of,
                         nb::dict hits, nb::list blocks, Py_ssize_t start, nb::list gone) {
  const nb::bytes nothing("", 0);
  const bool any_hits = PyDict_Size(hits.ptr()) != 0;
  Py_ssize_t i = start;
  for (const Py_ssize_t all = size(blocks); i < all; ++i) {
    PyObject* const object = at(blocks, i);
    const long block = number(object);
    PyObject* const key = at(keys, block);
    const long node = number(at(parents, block));
    if (key == Py_None || node < 0 || at(child_of, block) != Py_None) break;
    PyObject* const child = at(child_of, node);
    if (child != object && !(PyLong_Check(child) && number(child) == block)) break;
    append(gone, key);
    if (PyDict_DelItem(by_key.ptr(), key) != 0) nb::raise_python_error();
    put(keys, block, Py_None);
    put(tokens, block, nothing.ptr());
    put(child_of, node, Py_None);
    if (any_hits) move_hits(hits, object, at(parents, block));
  }
  return i;
}

void stand_in(nb::dict run_of, nb::object run, nb::list blocks) {
  for (Py_ssize_t i = 0, all = size(blocks); i < all; ++i)
    if (PyDict_SetItem(run_of.ptr(), at(blocks, i), run.ptr()) != 0) nb::raise_python_error();
}

void step_out(nb::dict run_of, nb::list blocks) {
  for (Py_ssize_t i = 0, all = size(blocks); i < all; ++i)
    if (PyDict_DelItem(run_of.ptr(), at(blocks, i)) != 0) nb::raise_python_error();
}

nb::list still_in(nb::dict run_of, nb::object run, nb::list places) {
  nb::list blocks;
  for (Py_ssize_t i = 0, all = size(places); i < all; ++i)
    if (look_up(run_of, at(places, i)) == run.ptr()) append(blocks, at(places, i));
  return blocks;
}

}  // namespace

void bind_loops(nb::module_& m) {
  m.def("add_owner", &add_owner);
  m.def("drop_owner", &drop_owner);
  m.def("add_cache", &add_cache);
  m.def("drop_cache", &drop_cache);
  m.def("follow", &follow);
  m.def("link_blocks", &link_blocks);
  m.def("unlink_blocks", &unlink_blocks);
  m.def("stand_in", &stand_in);
  m.def("step_out", &step_out);
  m.def("still_in", &still_in);
}
