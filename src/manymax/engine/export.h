// How a function of the native library is made visible to its caller. Everything else is hidden (-fvisibility=hidden),
// so that no name of these libraries can meet one of another library in the process.
//
// Functions have C names and C arguments: pointers, int64_t, int. native_library.py calls them through ctypes, by name,
// as `<function>_float32` or `<function>_float64`. Nothing of Python or torch is included or linked, so that one
// library works with every version of both.

#pragma once

#define NATIVE extern "C" __attribute__((visibility("default")))
