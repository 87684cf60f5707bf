// y = x W^T + bias for bf16 x and W, on CPUs that multiply pairs of bf16. W is packed once, in place:
//
//   W [n][k]  ->  [n / 16][k / 2][n % 16][k % 2]     a panel is 16 rows of W; a vector holds 16 rows' pair of
//   k
//
// so that weights are read as one stream and a product needs no sum over lanes. Each output is summed over k
// in one order whatever the number of rows and threads, so that a row of x gives the same bits in any batch.
#include "simd.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

#include <algorithm>
#include <vector>

namespace carousel {

constexpr int kPanel = 16;  // rows of W
// Rows of x whose sums are in registers at a time, beside 4 panels or 2: 24 of the 32 registers.
constexpr int kFewRows = 6;
constexpr int kManyRows = 12;
constexpr int kRowsPerTask = 96;
// Ahead in the weights. 2 to 4 KiB measure alike; at 8 to 32 rows 1 KiB is 10 to 14 % slower and none up to
// 45 %; one row needs none (2 cores, EPYC Zen 5, 2026-11).
constexpr int kPrefetchBytes = 4096;
constexpr int64_t kMinParallelWork = 1 << 17;  // products; below, waking a team costs more than it saves

// The binding mirrors it field by field.
struct LinearCall {
  const bf16* x;           // [num_rows, k]
  const uint32_t* weight;  // packed [n, k]
  const bf16* bias;        // [n], or null
  void* out;               // [num_rows, n]
  int32_t num_rows;
  int32_t n;
  int32_t k;
  int32_t out_is_float;  // float32 instead of bf16
  int32_t num_threads;
};

inline void write(const LinearCall& call, int row, int panel, vfloat y) {
  const int64_t at = (int64_t)row * call.n + panel * kPanel;
  if (call.bias) y += load(call.bias + panel * kPanel);
  if (call.out_is_float) {
    store((float*)call.out + at, y);
  } else {
    _mm256_storeu_si256((__m256i*)((bf16*)call.out + at), (__m256i)_mm512_cvtneps_pbh((__m512)y));
  }
}

template <int Rows, int Panels>
void multiply(const LinearCall& call, int row, int panel) {
  const int pairs = call.k / 2;
  const uint32_t* weight = call.weight + (int64_t)panel * pairs * kPanel;
  const bf16* x = call.x + (int64_t)row * call.k;
  vfloat sum[Rows][Panels] = {};
  for (int u = 0; u < pairs; ++u) {
    __m512bh w[Panels];
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
      const uint32_t* at = weight + ((int64_t)p * pairs + u) * kPanel;
      w[p] = (__m512bh)_mm512_loadu_si512(at);
      __builtin_prefetch((const char*)at + kPrefetchBytes);
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      int32_t pair;
      std::memcpy(&pair, x + (int64_t)r * call.k + 2 * u, sizeof pair);
      const __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int p = 0; p < Panels; ++p) {
        sum[r][p] = (vfloat)_mm512_dpbf16_ps((__m512)sum[r][p], value, w[p]);
      }
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int p = 0; p < Panels; ++p) write(call, row + r, panel + p, sum[r][p]);
  }
}

// Rows of x [row, row + Rows) by `panels` panels.
template <int Rows>
void multiply_rows(const LinearCall& call, int row, int panel, int panels) {
  constexpr int kWide = Rows <= kFewRows ? 4 : 2;
  int p = 0;
  for (; p + kWide <= panels; p += kWide) multiply<Rows, kWide>(call, row, panel + p);
  for (; p < panels; ++p) multiply<Rows, 1>(call, row, panel + p);
}

template <int... Rows>
void multiply_last_rows(const LinearCall& call, int row, int num_rows, int panel, int panels,
                        std::integer_sequence<int, Rows...>) {
  (void)((num_rows == Rows + 1 && (multiply_rows<Rows + 1>(call, row, panel, panels), true)) || ...);
}

// A task's panels stay in the cache while all its rows pass.
void multiply_task(const LinearCall& call, int row, int end_row, int panel, int panels) {
  for (; row + kManyRows <= end_row; row += kManyRows) multiply_rows<kManyRows>(call, row, panel, panels);
  multiply_last_rows(call, row, end_row - row, panel, panels,
                     std::make_integer_sequence<int, kManyRows - 1>());
}

void linear(const LinearCall& call) {
  const int num_panels = call.n / kPanel;
  const int64_t work = (int64_t)call.num_rows * call.n * call.k;
  const int threads = work < kMinParallelWork ? 1 : call.num_threads;
  // Few panels go one by one, so that every thread has some.
  const int wide = num_panels >= 16 * threads ? 4 : num_panels >= 4 * threads ? 2 : 1;
  const int columns = (num_panels + wide - 1) / wide;
  const int row_tasks = (call.num_rows + kRowsPerTask - 1) / kRowsPerTask;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int task = 0; task < columns * row_tasks; ++task) {
    const int panel = task / row_tasks * wide;
    const int row = task % row_tasks * kRowsPerTask;
    multiply_task(call, row, std::min(row + kRowsPerTask, call.num_rows), panel,
                  std::min(wide, num_panels - panel));
  }
}

}  // namespace carousel

CAROUSEL_EXPORT int32_t carousel_packs_linear() { return 1; }

CAROUSEL_EXPORT void carousel_linear(const carousel::LinearCall* call) { carousel::linear(*call); }

// weight [n, k] in place; n a multiple of 16, k of 2.
CAROUSEL_EXPORT void carousel_pack_linear(uint32_t* weight, int64_t n, int64_t k, int32_t num_threads) {
  using carousel::kPanel;
  const int64_t pairs = k / 2;
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (int64_t panel = 0; panel < n / kPanel; ++panel) {
    uint32_t* to = weight + panel * kPanel * pairs;
    const std::vector<uint32_t> rows(to, to + kPanel * pairs);
    for (int64_t i = 0; i < kPanel; ++i) {
      for (int64_t u = 0; u < pairs; ++u) to[u * kPanel + i] = rows[i * pairs + u];
    }
  }
}

// out[t] = row ids[t] of a packed weight [n, k], for count ids.
CAROUSEL_EXPORT void carousel_packed_rows(const uint32_t* weight, int64_t k, const int64_t* ids,
                                          int64_t count, uint32_t* out) {
  using carousel::kPanel;
  const int64_t pairs = k / 2;
  for (int64_t t = 0; t < count; ++t) {
    const uint32_t* row = weight + ids[t] / kPanel * kPanel * pairs + ids[t] % kPanel;
    for (int64_t u = 0; u < pairs; ++u) out[t * pairs + u] = row[u * kPanel];
  }
}

#else

CAROUSEL_EXPORT int32_t carousel_packs_linear() { return 0; }

#endif
