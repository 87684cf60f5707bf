// y = x W^T + bias. W is packed once, in place, as panels.h has it: a word is one float32 or a pair of bf16 of a
// row. Here are the pairs on CPUs that multiply them; all else is linear_widened.cpp's.
#include "linear_tiles.h"
#include "linear_widened.h"

namespace carousel {

#if defined(__AVX512BF16__)

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
    const bf16* x = (const bf16*)call.x + (int64_t)row * k;
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
      for (int p = 0; p < Panels; ++p) write_panel<bf16>(call, row + r, panel + p, 0, sum[r][p]);
    }
  }
};

#endif

void multiply(const LinearCall& call) {
#if defined(CAROUSEL_HAS_TILES)
  if (call.is_bf16 && fits_tiles(call.k)) return multiply_by_tiles(call);
#endif
#if defined(__AVX512BF16__)
  if (call.is_bf16) return multiply_all(Bf16Kernel{call}, call.num_rows, call.n, call.k, call.num_threads);
#endif
  multiply_widened(call);
}

// Whether a call of this k may have a gate.
bool takes_gate(int k, bool is_bf16) {
#if defined(CAROUSEL_HAS_TILES)
  if (is_bf16 && fits_tiles(k)) return true;
#endif
#if defined(__AVX512BF16__)
  if (is_bf16) return false;
#endif
  (void)k, (void)is_bf16;
  return true;
}

}  // namespace carousel

CAROUSEL_EXPORT int32_t carousel_gates_linear(int32_t k, int32_t is_bf16) {
  return carousel::takes_gate(k, is_bf16 != 0);
}

CAROUSEL_EXPORT void carousel_linear(const carousel::LinearCall* call) { carousel::multiply(*call); }
