// pagedkv._cache is one module made of two files: block keys, and the loops over blocks. It needs neither torch nor
// threads, and cache/ loads neither.
#pragma once
#include <nanobind/nanobind.h>

void bind_loops(nanobind::module_& m);
