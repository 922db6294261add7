// The matrix products of a head: the scores of a block of queries, and the gradients of queries and class vectors.
//
// A table of scores has two long sides, but the vectors are short: 200 queries, 100,000 classes, 64 numbers. Libraries
// for matrix products were made for three long sides, and take a block of scores at about half of their speed. Here a
// class vector is read once for all queries of a block, and what the head does next is done while numbers are in cache:
// scores are written together with the maxima of their groups, and one pass over a table serves both of its products.
//
// Which sums are added up in which order depends on the sizes alone, up to 8 threads, and not on the number of threads.

#include "rows.h"
#include "scoring.h"

namespace {

#if defined(__AVX512F__)
constexpr int64_t REGISTER_BYTES = 64, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int64_t REGISTER_BYTES = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int64_t REGISTER_BYTES = 16, REGISTERS = 32;
#else
constexpr int64_t REGISTER_BYTES = 16, REGISTERS = 16;
#endif

constexpr int64_t CACHE_LINE = 64;  // bytes

// Rows and registers of a piece of the product whose sums stay in registers: with one row of the second factor and one
// number of the first that makes 29 registers of 32, or 15 of 16.
constexpr int64_t ROWS = 6, COLUMNS = REGISTERS == 32 ? 4 : 2;

template <typename T>
constexpr int64_t LANES = REGISTER_BYTES / sizeof(T);  // numbers of a register

// The second factor of a product is laid out in panels of so many columns, row after row.
template <typename T>
constexpr int64_t PANEL = COLUMNS * LANES<T>;

// Classes whose gradients are worked on at a time, and rows of the table: they and their vectors fit the second-level
// cache. Groups of 64 classes, the same as those of rows.h, are worked on at a time for the scores.
constexpr int64_t TILE = 128, TILE_ROWS = 256;
static_assert(GROUP % PANEL<float> == 0 && TILE % GROUP == 0, "a group has whole panels, and a tile whole groups");

// out[m, :] = sum_k a[m row_step + k depth_step] panel[k, :] for some rows m and all columns of a panel. With `add` it
// is added to what is in `out`.
template <typename T, int64_t rows, int64_t columns>
inline void multiply_piece(const T* a, int64_t row_step, int64_t depth_step, const T* panel, int64_t depth, T* out,
                           int64_t out_step, bool add) {
  typedef T Register __attribute__((vector_size(REGISTER_BYTES), aligned(sizeof(T)), may_alias));
  // All loops over rows and columns are unrolled: a register cannot be chosen by a number.
  Register sums[rows][columns];
#define EVERY_SUM                                                                                                      \
  _Pragma("GCC unroll 8") for (int64_t m = 0; m < rows; ++m)                                                           \
      _Pragma("GCC unroll 8") for (int64_t v = 0; v < columns; ++v)
  EVERY_SUM sums[m][v] = Register{};
  for (int64_t k = 0; k < depth; ++k) {
    const Register* const b = reinterpret_cast<const Register*>(panel) + k * columns;
    EVERY_SUM sums[m][v] += a[m * row_step + k * depth_step] * b[v];
  }
  const auto place = [&](int64_t m, int64_t v) { return reinterpret_cast<Register*>(out + m * out_step) + v; };
  if (add) {
    EVERY_SUM *place(m, v) += sums[m][v];
  } else {
    EVERY_SUM *place(m, v) = sums[m][v];
  }
#undef EVERY_SUM
}

// The same for any number of rows. Not inlined: the loop needs all registers, of which its surroundings would take
// some.
template <typename T, int64_t columns>
__attribute__((noinline)) void multiply_columns(const T* a, int64_t rows, int64_t row_step, int64_t depth_step,
                                                const T* panel, int64_t depth, T* out, int64_t out_step, bool add) {
  int64_t m = 0;
  for (; m + ROWS <= rows; m += ROWS)
    multiply_piece<T, ROWS, columns>(a + m * row_step, row_step, depth_step, panel, depth, out + m * out_step, out_step,
                                     add);
  for (; m < rows; ++m)
    multiply_piece<T, 1, columns>(a + m * row_step, row_step, depth_step, panel, depth, out + m * out_step, out_step,
                                  add);
}

// The same for a panel of so many registers.
template <typename T>
void multiply(const T* a, int64_t rows, int64_t row_step, int64_t depth_step, const T* panel, int64_t columns,
              int64_t depth, T* out, int64_t out_step, bool add) {
  const auto with = [&](auto multiply_some) {
    multiply_some(a, rows, row_step, depth_step, panel, depth, out, out_step, add);
  };
  if (columns == 1) return with(multiply_columns<T, 1>);
  if (columns == 2) return with(multiply_columns<T, 2>);
  if constexpr (COLUMNS == 4) {
    if (columns == 3) return with(multiply_columns<T, 3>);
    with(multiply_columns<T, 4>);
  }
}

// Scores ------------------------------------------------------------------------------------------

// The numbers of two registers at the given places. gcc knows it under the second name from version 12 on.
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, Places{i, j, k, l})
#endif

// panel[i, c] = vectors[c, i] factor[c] for `size` classes c, 0 for other columns, and i < d; the factor is 1 where it is
// null. Four classes and four numbers at a time: a number after the other would go to another cache line each. The
// factors are on the class vectors, which all rows of the block share, and join them here, where they are in registers.
template <bool scaled, typename T>
void transpose(const T* vectors, const T* factor, int64_t size, int64_t d, T* panel) {
  constexpr int64_t width = PANEL<T>;
  typedef T Four __attribute__((vector_size(4 * sizeof(T)), aligned(sizeof(T)), may_alias));
  typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> Places __attribute__((vector_size(4 * sizeof(T))));
  static_assert(sizeof(Places) == sizeof(Four), "a place for each number");
  int64_t c = 0;
  for (; c + 4 <= size; c += 4) {
    const T* const from = vectors + c * d;
    T* const to = panel + c;
    const Four of_classes = scaled ? *reinterpret_cast<const Four*>(factor + c) : Four{};
    int64_t i = 0;
    for (; i + 4 <= d; i += 4) {
      const auto four = [&](int64_t k) { return *reinterpret_cast<const Four*>(from + k * d + i); };
      const auto put = [&](int64_t k, Four value) {
        *reinterpret_cast<Four*>(to + (i + k) * width) = scaled ? value * of_classes : value;
      };
      const Four a = four(0), b = four(1), e = four(2), f = four(3);
      const Four ab = SHUFFLE(a, b, 0, 4, 1, 5), ef = SHUFFLE(e, f, 0, 4, 1, 5);  // a0 b0 a1 b1, e0 f0 e1 f1
      put(0, SHUFFLE(ab, ef, 0, 1, 4, 5));
      put(1, SHUFFLE(ab, ef, 2, 3, 6, 7));
      const Four ba = SHUFFLE(a, b, 2, 6, 3, 7), fe = SHUFFLE(e, f, 2, 6, 3, 7);  // a2 b2 a3 b3, e2 f2 e3 f3
      put(2, SHUFFLE(ba, fe, 0, 1, 4, 5));
      put(3, SHUFFLE(ba, fe, 2, 3, 6, 7));
    }
    for (; i < d; ++i)
      for (int64_t k = 0; k < 4; ++k) to[i * width + k] = from[k * d + i] * (scaled ? factor[c + k] : T(1));
  }
  for (; c < width; ++c)
    for (int64_t i = 0; i < d; ++i)
      panel[i * width + c] = c < size ? vectors[c * d + i] * (scaled ? factor[c] : T(1)) : T(0);
}

// Add the bias to the scores of a group, if there is one; returns their maximum, or +inf if one is nan: a comparison
// with nan is false, so that a plain maximum would pass over it.
template <typename T>
inline T finish_group(T* s, const T* bias) {
  typedef T Register __attribute__((vector_size(REGISTER_BYTES), aligned(sizeof(T)), may_alias));
  const Register low = Register{} - std::numeric_limits<T>::infinity();
  Register top = low;
  auto nan = low != low;
  for (int64_t c = 0; c < GROUP; c += LANES<T>) {
    Register* const place = reinterpret_cast<Register*>(s + c);
    const Register x = bias ? *place + *reinterpret_cast<const Register*>(bias + c) : *place;
    if (bias) *place = x;
    nan |= x != x;
    top = x > top ? x : top;
  }
  top = nan ? -low : top;
  T lanes[LANES<T>];
  std::memcpy(lanes, &top, sizeof top);
  T most = -std::numeric_limits<T>::infinity();
#pragma omp simd reduction(max : most)
  for (int64_t lane = 0; lane < LANES<T>; ++lane) most = lanes[lane] > most ? lanes[lane] : most;
  return most;
}

// scores[r, c] = input[r] . vectors[c] factor[c] + bias[c], -inf in the padding, and the maximum of each group of classes
// in `tops`, +inf where a score is nan. The padding of a row ends at the end of its last group, or before. With a cap
// above 0 scores are capped. What is null is left out.
template <typename T>
void all_scores(const T* input, int64_t n, int64_t d, const T* vectors, const T* factor, const T* bias, double cap,
                int64_t classes, T* scores, int64_t stride, T* tops, int threads) {
  const T height = static_cast<T>(cap), inverse = static_cast<T>(cap > 0 ? 1 / cap : 0);
  const int64_t groups = (classes + GROUP - 1) / GROUP;
  // Some groups at a time, whose rows of scores are one page of memory; fewer where threads would have too little to
  // share.
  const int64_t chunk = std::max<int64_t>(1, std::min<int64_t>(16, groups / (8 * threads)));
#pragma omp parallel num_threads(threads)
  {
    Buffer<T> panels(GROUP * d);
    T last_scores[ROWS * GROUP], last_bias[GROUP];
    for (int64_t c = 0; c < GROUP; ++c) {
      const int64_t place = (groups - 1) * GROUP + c;
      last_bias[c] = place >= classes ? -std::numeric_limits<T>::infinity() : bias ? bias[place] : T(0);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t begin = 0; begin < groups; begin += chunk) {
      for (int64_t g = begin; g < std::min(groups, begin + chunk); ++g) {
        const int64_t first = g * GROUP, size = std::min(GROUP, classes - first);
        for (int64_t c = 0; c < GROUP; c += PANEL<T>) {
          const int64_t some = std::clamp<int64_t>(size - c, 0, PANEL<T>), place = first + c;
          T* const panel = panels.data() + c * d;
          if (factor) transpose<true>(vectors + place * d, factor + place, some, d, panel);
          else transpose<false>(vectors + place * d, factor, some, d, panel);
        }
        // The vectors of the next group are fetched from memory a few at a time, while this group is computed.
        const char* next = reinterpret_cast<const char*>(vectors + (first + GROUP) * d);
        const char* const last = reinterpret_cast<const char*>(vectors + std::min(classes, first + 2 * GROUP) * d);
        const int64_t lines = (last - next) * ROWS / std::max<int64_t>(1, n - ROWS) / CACHE_LINE + 1;
        // The last group may have fewer classes: it is computed beside the table, with a bias of -inf for the others.
        const bool whole = size == GROUP;
        const T* const added = !whole ? last_bias : bias ? bias + first : nullptr;
        const auto finish = [&](int64_t r, T* s, int64_t step) {
          for (int64_t m = 0; m < std::min(ROWS, n - r); ++m) {
            T* const group = s + m * step;
            const T* more = added;
            if (cap > 0) {
              if (added)
#pragma omp simd
                for (int64_t c = 0; c < GROUP; ++c) group[c] += added[c];
              more = nullptr;
              cap_scores(group, GROUP, height, inverse);
            }
            tops[(r + m) * groups + g] = finish_group(group, more);
          }
        };
        for (int64_t r = 0; r < n; r += ROWS) {
          for (int64_t k = 0; k < lines && next < last; ++k, next += CACHE_LINE) __builtin_prefetch(next);
          const int64_t rows = std::min(ROWS, n - r), step = whole ? stride : GROUP;
          T* const out = whole ? scores + r * stride + first : last_scores;
          for (int64_t c = 0; c < GROUP; c += PANEL<T>)
            multiply_columns<T, COLUMNS>(input + r * d, rows, d, 1, panels.data() + c * d, d, out + c, step, false);
          if (!whole) {
            finish(r, out, step);
            for (int64_t m = 0; m < rows; ++m)
              std::copy_n(out + m * step, stride - first, scores + (r + m) * stride + first);
          } else if (r > 0) {
            // The rows before these: to read what was written a moment ago takes a tenth of the time of the product.
            finish(r - ROWS, out - ROWS * stride, stride);
          }
        }
        const int64_t left = (n - 1) / ROWS * ROWS;
        if (whole) finish(left, scores + left * stride + first, stride);
      }
    }
  }
}

// Gradients ---------------------------------------------------------------------------------------

// The number of registers of the panel that begins at column `start` of d columns.
template <typename T>
int64_t columns_from(int64_t start, int64_t d) {
  return (std::min(PANEL<T>, d - start) + LANES<T> - 1) / LANES<T>;
}

// Some rows of a (rows, d) table, from column `start` on, as a panel, with zeros up to a whole register.
template <typename T>
void lay_out(const T* table, int64_t rows, int64_t d, int64_t start, T* panel) {
  const int64_t size = std::min(PANEL<T>, d - start), width = columns_from<T>(start, d) * LANES<T>;
  for (int64_t r = 0; r < rows; ++r, panel += width) {
    std::copy_n(table + r * d + start, size, panel);
    std::fill(panel + size, panel + width, T(0));
  }
}

// With a table of gradients g (n, classes):
//
//   product[r]       = sum_c g[r, c] vectors[c]
//   grad_vectors[c] += sum_r g[r, c] queries[r]
//   grad_bias[c]    += sum_r g[r, c] scale[r]
//
// for those of the three that are not null. Row r of g is row places[r] of the table, or row r if there are none. The
// queries have the factors of their rows in them. `chunks` is the number of sums over classes of which each product is
// the sum. With `factor`, (classes,), and the capped scores of the table's rows, g is what is in the table times the
// factors of the classes and the slopes of the cap: the gradient of products from that of scores.
template <typename T>
void all_gradients(const T* table, const int64_t* places, int64_t n, int64_t stride, int64_t classes, const T* queries,
                   const T* scale, int64_t d, const T* vectors, const T* factor, const T* capped, double cap,
                   T* product, T* grad_vectors, T* grad_bias, int64_t chunks, int threads) {
  const T inverse = static_cast<T>(cap > 0 ? 1 / cap : 0);
  const int64_t wide = (d + PANEL<T> - 1) / PANEL<T> * PANEL<T>;  // d and what fills the last panel
  const int64_t chunk = ((classes + chunks - 1) / chunks + TILE - 1) / TILE * TILE;
  Buffer<T> sums(product ? chunks * n * wide : 0), laid_out(grad_vectors ? n * wide : 0);
  if (grad_vectors)
    for (int64_t start = 0; start < d; start += PANEL<T>) lay_out(queries, n, d, start, laid_out.data() + start * n);
#pragma omp parallel num_threads(threads)
  {
    Buffer<T> tile(TILE_ROWS * TILE), panel(TILE * PANEL<T>);
    // A chunk of classes is worked on by one thread, which alone writes their gradients.
#pragma omp for schedule(dynamic, 1)
    for (int64_t k = 0; k < chunks; ++k) {
      T* const sum = sums.data() + (product ? k * n * wide : 0);
      if (product) std::fill_n(sum, n * wide, T(0));
      for (int64_t first = k * chunk; first < std::min(classes, (k + 1) * chunk); first += TILE) {
        const int64_t size = std::min(TILE, classes - first);
        for (int64_t begin = 0; begin < n; begin += TILE_ROWS) {
          const int64_t rows = std::min(TILE_ROWS, n - begin);
          for (int64_t r = 0; r < rows; ++r) {
            const int64_t place = places ? places[begin + r] : begin + r;
            T* const g = tile.data() + r * TILE;
            std::copy_n(table + place * stride + first, size, g);
            if (capped) times_slope(g, capped + place * stride + first, size, inverse);
            if (factor)
#pragma omp simd
              for (int64_t c = 0; c < size; ++c) g[c] *= factor[first + c];
          }
          if (grad_bias)
            for (int64_t r = 0; r < rows; ++r) {
              const T of_row = scale[begin + r];
#pragma omp simd
              for (int64_t c = 0; c < size; ++c) grad_bias[first + c] += of_row * tile[r * TILE + c];
            }
          for (int64_t start = 0; start < d; start += PANEL<T>) {
            const int64_t left = std::min(PANEL<T>, d - start), columns = columns_from<T>(start, d);
            const int64_t width = columns * LANES<T>;
            if (product) {
              // Class vectors of one whole panel are laid out as they are.
              const bool whole = width == d;
              if (!whole) lay_out(vectors + first * d, size, d, start, panel.data());
              multiply(tile.data(), rows, TILE, 1, whole ? vectors + first * d : panel.data(), columns, size,
                       sum + start * n + begin * width, width, true);
            }
            if (!grad_vectors) continue;
            const T* const right = laid_out.data() + start * n + begin * width;
            if (left == width) {
              multiply(tile.data(), size, 1, TILE, right, columns, rows, grad_vectors + first * d + start, d, true);
            } else {
              multiply(tile.data(), size, 1, TILE, right, columns, rows, panel.data(), width, false);
              for (int64_t c = 0; c < size; ++c)
                for (int64_t i = 0; i < left; ++i) grad_vectors[(first + c) * d + start + i] += panel[c * width + i];
            }
          }
        }
      }
    }
    if (product) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < n; ++r)
        for (int64_t start = 0; start < d; start += PANEL<T>) {
          const int64_t left = std::min(PANEL<T>, d - start), width = columns_from<T>(start, d) * LANES<T>;
          T* const out = product + r * d + start;
          std::fill_n(out, left, T(0));
          for (int64_t k = 0; k < chunks; ++k) {
            const T* const sum = sums.data() + k * n * wide + start * n + r * width;
#pragma omp simd
            for (int64_t i = 0; i < left; ++i) out[i] += sum[i];
          }
        }
    }
  }
}

}  // namespace

// C functions for ctypes, one per precision; arguments as engine/native.py passes them.
#define EXPORT(T, SUFFIX)                                                                                              \
  NATIVE void block_scores_##SUFFIX(const T* input, int64_t n, int64_t d, const T* vectors, const T* factor,           \
                                    const T* bias, const double* cap, int64_t classes, T* scores, int64_t stride,      \
                                    T* tops, int threads) {                                                            \
    all_scores<T>(input, n, d, vectors, factor, bias, *cap, classes, scores, stride, tops, threads);                   \
  }                                                                                                                    \
  NATIVE void dense_gradients_##SUFFIX(const T* table, const int64_t* places, int64_t n, int64_t stride,               \
                                       int64_t classes, const T* queries, const T* scale, int64_t d, const T* vectors, \
                                       const T* factor, const T* capped, const double* cap, T* product,                \
                                       T* grad_vectors, T* grad_bias, int64_t chunks, int threads) {                   \
    all_gradients<T>(table, places, n, stride, classes, queries, scale, d, vectors, factor, capped, *cap, product,     \
                     grad_vectors, grad_bias, chunks, threads);                                                        \
  }

EXPORT(float, float32)
EXPORT(double, float64)
