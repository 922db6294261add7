// Calls functions of a native library with arguments from a file, and writes what they leave in their tensors into
// another one: a caller without Python, for machines that exist as an emulator alone.
//
// The file: the number of calls; for each call the length of the function's name, the name, the number of arguments; for
// each argument a number of bytes and these bytes (a tensor), or -1 and a number, or -2 for a null pointer. All numbers
// are int64.

#include <dlfcn.h>
#include <omp.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

static FILE* in;

static int64_t number() {
  int64_t value = 0;
  if (std::fread(&value, sizeof value, 1, in) != 1) std::exit(2);
  return value;
}

int main(int, char** argv) {
  omp_set_num_threads(2);  // a call, so that the OpenMP library is linked to this program, as it is to torch
  void* library = dlopen(argv[1], RTLD_NOW);
  if (!library) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 3;
  }
  in = std::fopen(argv[2], "rb");
  FILE* out = std::fopen(argv[3], "wb");
  for (int64_t calls = number(); calls > 0; --calls) {
    std::string name(number(), ' ');
    if (std::fread(&name[0], 1, name.size(), in) != name.size()) return 2;
    const int64_t count = number();
    std::vector<std::vector<char>> tensors;
    tensors.reserve(count);
    int64_t a[24] = {};  // pointers, int64_t and int are all passed in 8 bytes by the conventions of 64-bit Linux
    for (int64_t k = 0; k < count; ++k) {
      const int64_t size = number();
      if (size < 0) {
        a[k] = size == -1 ? number() : 0;
        continue;
      }
      tensors.emplace_back(size + 64);
      char* start = tensors.back().data();
      start += (64 - reinterpret_cast<uintptr_t>(start) % 64) % 64;
      if (std::fread(start, 1, size, in) != static_cast<size_t>(size)) return 2;
      a[k] = reinterpret_cast<int64_t>(start);
      tensors.back().resize(size + 64);
    }
    using I = int64_t;
    auto function = reinterpret_cast<void (*)(I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I)>(
        dlsym(library, name.c_str()));
    if (!function) return 4;
    function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15],
             a[16], a[17], a[18], a[19], a[20], a[21], a[22], a[23]);
    for (int64_t k = 0, t = 0; k < count; ++k)
      if (t < static_cast<int64_t>(tensors.size())) {
        auto& bytes = tensors[t];
        char* start = bytes.data();
        start += (64 - reinterpret_cast<uintptr_t>(start) % 64) % 64;
        if (a[k] != reinterpret_cast<int64_t>(start)) continue;
        std::fwrite(start, 1, bytes.size() - 64, out);
        ++t;
      }
  }
  std::fclose(out);
}
