# The kernels: which files, and the flags of each instruction set. Included by the package's build and by the
# stand-alone drivers (sanitizers, cross builds), so that all compile the same thing.
set(PAGEDKV_SOURCE ${CMAKE_CURRENT_LIST_DIR})
set(PAGEDKV_BINDINGS ${PAGEDKV_SOURCE}/bindings.cpp ${PAGEDKV_SOURCE}/bindings_attention.cpp
    ${PAGEDKV_SOURCE}/bindings_product.cpp)
set(PAGEDKV_TOPICS attention product elementwise)  # each has <topic>.cpp and one <topic>_<isa>.cpp per instruction set
set(PAGEDKV_KERNELS ${PAGEDKV_SOURCE}/dispatch.cpp ${PAGEDKV_SOURCE}/attention_plan.cpp
    ${PAGEDKV_SOURCE}/decoder.cpp ${PAGEDKV_SOURCE}/product_pack.cpp)

# -ffp-contract=off: a product and a sum are fused only where the code says so, so results are well defined.
# -fno-strict-aliasing: packed buffers are dwords that hold one float or two bf16.
set(PAGEDKV_FLAGS -O3 -fopenmp -ffp-contract=off -fno-math-errno -fno-strict-aliasing -Wall -Wextra)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND PAGEDKV_FLAGS -Wno-uninitialized -Wno-maybe-uninitialized)  # false ones, inside GCC 12's own intrinsics
endif()
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  set(PAGEDKV_DEFINITIONS PAGEDKV_X86)
  set(PAGEDKV_ISAS generic avx2 avx512 avx512bf16)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  set(PAGEDKV_DEFINITIONS PAGEDKV_ARM64)
  set(PAGEDKV_ISAS generic neon)
else()
  set(PAGEDKV_DEFINITIONS "")
  set(PAGEDKV_ISAS generic)
endif()
set(PAGEDKV_FLAGS_avx2 -mavx2 -mfma -mf16c -mprfchw)
set(PAGEDKV_FLAGS_avx512 ${PAGEDKV_FLAGS_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
set(PAGEDKV_FLAGS_avx512bf16 ${PAGEDKV_FLAGS_avx512} -mavx512bf16 -mavx512vbmi -mavx512vnni)

foreach(topic ${PAGEDKV_TOPICS})
  list(APPEND PAGEDKV_KERNELS ${PAGEDKV_SOURCE}/${topic}.cpp)
  foreach(isa ${PAGEDKV_ISAS})
    set(file ${PAGEDKV_SOURCE}/${topic}_${isa}.cpp)
    list(APPEND PAGEDKV_KERNELS ${file})
    set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "${PAGEDKV_FLAGS_${isa}}")
  endforeach()
endforeach()
