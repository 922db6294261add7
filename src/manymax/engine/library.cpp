// What native_library.py asks a library before it calls a kernel: what it was made of, and what the processor has.

#include <string>

#include "export.h"

// The hash of all sources, which hatch_build.py gives.
#ifndef MANYMAX_SOURCES
#define MANYMAX_SOURCES "unknown"
#endif

NATIVE const char* manymax_sources() { return MANYMAX_SOURCES; }

// Features of this processor that the operating system lets programs use, by name, with a space between. The compiler's
// own test is taken because it looks at both, the same way on every system. Only the plain library is asked: another
// one may hold instructions that the processor does not have.
NATIVE const char* manymax_features() {
  static const std::string found = [] {
    std::string names;
#if defined(__x86_64__)
    __builtin_cpu_init();
    // The builtin takes literals alone, hence no loop.
    if (__builtin_cpu_supports("avx2")) names += "avx2 ";
    if (__builtin_cpu_supports("fma")) names += "fma ";
    if (__builtin_cpu_supports("avx512f")) names += "avx512f ";
    if (__builtin_cpu_supports("avx512bw")) names += "avx512bw ";
    if (__builtin_cpu_supports("avx512dq")) names += "avx512dq ";
    if (__builtin_cpu_supports("avx512vl")) names += "avx512vl ";
    if (__builtin_cpu_supports("avx512vnni")) names += "avx512vnni ";
#endif
    return names;
  }();
  return found.c_str();
}
