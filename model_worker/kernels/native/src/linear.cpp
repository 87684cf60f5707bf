// y = x W^T + bias for bf16 x and W, on CPUs that multiply pairs of bf16. W is packed once, in place, as panels.h
// has it: a word is a pair of a row's elements, a vector 16 rows' pair.
#include "linear_tiles.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

namespace carousel {

// Ahead in the weights. 2 to 4 KiB measure alike; at 8 to 32 rows 1 KiB is 10 to 14 % slower and none up to
// 45 %; one row needs none (2 cores, EPYC Zen 5, 2026-11).
constexpr int kPrefetchBytes = 4096;

struct Bf16Kernel {
  const LinearCall& call;

  // Sums take 24 of the 32 registers.
  static constexpr int kMaxRows = 12;
  static constexpr int panels_for(int rows) { return rows <= 6 ? 4 : 2; }

  template <int Rows, int Panels>
  void multiply(int row, int panel) const {
    const int k = call.k, pairs = k / 2;
    const uint32_t* weight = call.weight + (int64_t)panel * pairs * kPanel;
    const bf16* x = call.x + (int64_t)row * k;
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
        std::memcpy(&pair, x + (int64_t)r * k + 2 * u, sizeof pair);
        const __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int p = 0; p < Panels; ++p) {
          sum[r][p] = (vfloat)_mm512_dpbf16_ps((__m512)sum[r][p], value, w[p]);
        }
      }
    }
    for (int r = 0; r < Rows; ++r) {
      for (int p = 0; p < Panels; ++p) call.write(row + r, panel + p, sum[r][p]);
    }
  }
};

}  // namespace carousel

CAROUSEL_EXPORT int32_t carousel_packs_linear() { return 1; }

// Whether a call of this k may have a gate.
CAROUSEL_EXPORT int32_t carousel_gates_linear(int32_t k) {
#if defined(CAROUSEL_HAS_TILES)
  return carousel::fits_tiles(k);
#else
  return 0;
#endif
}

CAROUSEL_EXPORT void carousel_linear(const carousel::LinearCall* call) {
  using namespace carousel;
#if defined(CAROUSEL_HAS_TILES)
  if (fits_tiles(call->k)) {
    multiply_by_tiles(*call);
    return;
  }
#endif
  multiply_all(Bf16Kernel{*call}, call->num_rows, call->n, call->k, call->num_threads);
}

#else

CAROUSEL_EXPORT int32_t carousel_packs_linear() { return 0; }

CAROUSEL_EXPORT int32_t carousel_gates_linear(int32_t) { return 0; }

#endif
