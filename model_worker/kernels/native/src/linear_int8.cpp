// Rows to int8, and y = x W^T * scales + bias for int8 x and W. W is packed once, in place, as panels.h has it: a
// word is four of a row's elements. 128 is added to x, because VNNI multiplies unsigned by signed, and 128 times
// the weights' sum is taken off at the end. Sums are int32 and exact, so all paths give the same ones.
#include "panels.h"
#include "simd.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace carousel {

constexpr int kWord = 4;             // elements of k
constexpr int kPrefetchAhead = 4096; // bytes, as in linear.cpp
constexpr int64_t kMinParallelElements = 1 << 15;

// The binding mirrors both field by field.
struct QuantizeCall {
  const void* x;  // [num_rows, size], size a multiple of 16
  uint8_t* out;   // [num_rows, size], 128 added
  float* scale;   // [num_rows]: of the row, the largest magnitude / 127
  int32_t num_rows;
  int32_t size;
  int32_t is_bf16;
  int32_t num_threads;
};

struct Int8LinearCall {
  const uint8_t* x;           // [num_rows, k], 128 added
  const float* x_scale;       // [num_rows]
  const uint32_t* weight;     // packed [n, k]
  const float* weight_scale;  // [n]
  const int32_t* weight_sum;  // [n], of each row's elements
  const void* bias;           // [n] of out's dtype, or null
  void* out;                  // [num_rows, n]
  int32_t num_rows;
  int32_t n;
  int32_t k;
  int32_t is_bf16;
  int32_t num_threads;
};

typedef uint8_t vbyte __attribute__((vector_size(kLanes)));

// A row with a NaN gets NaN as its scale, one with an infinity gets infinity: what is computed from it shows it.
template <class T>
void quantize_row(const T* x, int size, uint8_t* out, float* scale) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  vfloat largest = {};
  vint unordered = {};
  for (int c = 0; c < size; c += kLanes) {
    const vfloat value = load(x + c);
    unordered |= (vint)(value != value);
    largest = max(largest, (vfloat)((vint)value & 0x7fffffff));
  }
  bool is_nan = false;
  for (int i = 0; i < kLanes; ++i) is_nan |= unordered[i] != 0;
  const float most = is_nan ? NAN : max_of(largest);
  const float inverse = most > 0 ? 127.0f / most : 0.0f;
  for (int c = 0; c < size; c += kLanes) {
    const vint quantum = (vint)(load(x + c) * inverse + kRound) - 0x4b400000 + 128;
    const vbyte narrow = __builtin_convertvector(quantum, vbyte);
    std::memcpy(out + c, &narrow, sizeof narrow);
  }
  *scale = most / 127.0f;
}

template <class T>
void quantize_rows(const QuantizeCall& call) {
  const int64_t size = call.size;
  const int threads = call.num_rows * size < kMinParallelElements ? 1 : call.num_threads;
  parallel_ranges(threads, call.num_rows, [&](int row, int end) {
    for (; row < end; ++row) {
      quantize_row((const T*)call.x + row * size, call.size, call.out + row * size, call.scale + row);
    }
  });
}

inline int32_t word_at(const uint8_t* x) {
  int32_t word;
  std::memcpy(&word, x, sizeof word);
  return word;
}

template <class T>
struct Int8Kernel {
  const Int8LinearCall& call;

  void write(int row, int panel, const int32_t* sums) const {
    const int64_t first = panel * kPanel, at = (int64_t)row * call.n + first;
    for (int i = 0; i < kPanel; i += kLanes) {
      vint sum;
      std::memcpy(&sum, sums + i, sizeof sum);
      vint of_weights;
      std::memcpy(&of_weights, call.weight_sum + first + i, sizeof of_weights);
      sum -= of_weights * 128;
      vfloat y = __builtin_convertvector(sum, vfloat) * (load(call.weight_scale + first + i) * call.x_scale[row]);
      if (call.bias) y += load((const T*)call.bias + first + i);
      store((T*)call.out + at + i, y);
    }
  }

#if defined(__AVX512VNNI__)
  // At most 16 sums in registers: with 24 of the 32 taken, as for bf16, it computes half as fast (GCC 12 on EPYC
  // Zen 4, 2026-11).
  static constexpr int kMaxRows = 12;
  static constexpr int panels_for(int rows) { return rows <= 4 ? 4 : rows <= 8 ? 2 : 1; }

  template <int Rows, int Panels>
  void multiply(int row, int panel) const {
    const int k = call.k, words = k / kWord;
    const uint32_t* weight = call.weight + (int64_t)panel * words * kPanel;
    const uint8_t* x = call.x + (int64_t)row * k;
    __m512i sum[Rows][Panels] = {};
    for (int u = 0; u < words; ++u) {
      __m512i w[Panels];
#pragma GCC unroll 4
      for (int p = 0; p < Panels; ++p) {
        const uint32_t* at = weight + ((int64_t)p * words + u) * kPanel;
        w[p] = _mm512_loadu_si512(at);
        __builtin_prefetch((const char*)at + kPrefetchAhead);
      }
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) {
        const __m512i value = _mm512_set1_epi32(word_at(x + (int64_t)r * k + kWord * u));
#pragma GCC unroll 4
        for (int p = 0; p < Panels; ++p) sum[r][p] = _mm512_dpbusd_epi32(sum[r][p], value, w[p]);
      }
    }
    for (int r = 0; r < Rows; ++r) {
      for (int p = 0; p < Panels; ++p) {
        int32_t sums[kPanel];
        std::memcpy(sums, &sum[r][p], sizeof sums);
        write(row + r, panel + p, sums);
      }
    }
  }
#elif defined(__AVX2__)
  // Products of pairs of 16 bits; a weight row's two pairs are added at the end.
  static constexpr int kMaxRows = 2;
  static constexpr int panels_for(int) { return 1; }

  template <int Rows, int Panels>
  void multiply(int row, int panel) const {
    static_assert(Panels == 1);
    const int k = call.k, words = k / kWord;
    const int8_t* weight = (const int8_t*)(call.weight + (int64_t)panel * words * kPanel);
    const uint8_t* x = call.x + (int64_t)row * k;
    __m256i sum[Rows][4] = {};  // a vector is four rows of the weight, two pairs each
    for (int u = 0; u < words; ++u) {
      __m256i w[4];
      for (int i = 0; i < 4; ++i) {
        w[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(weight + u * kPanel * kWord + 16 * i)));
      }
      for (int r = 0; r < Rows; ++r) {
        const __m128i word = _mm_cvtsi32_si128(word_at(x + (int64_t)r * k + kWord * u));
        const __m256i value = _mm256_broadcastq_epi64(_mm_cvtepu8_epi16(word));
        for (int i = 0; i < 4; ++i) sum[r][i] = _mm256_add_epi32(sum[r][i], _mm256_madd_epi16(value, w[i]));
      }
    }
    for (int r = 0; r < Rows; ++r) {
      int32_t pairs[2 * kPanel], sums[kPanel];
      std::memcpy(pairs, sum[r], sizeof pairs);
      for (int i = 0; i < kPanel; ++i) sums[i] = pairs[2 * i] + pairs[2 * i + 1];
      write(row + r, panel, sums);
    }
  }
#else
  static constexpr int kMaxRows = 1;
  static constexpr int panels_for(int) { return 1; }

  template <int Rows, int Panels>
  void multiply(int row, int panel) const {
    static_assert(Rows == 1 && Panels == 1);
    const int words = call.k / kWord;
    const int8_t* weight = (const int8_t*)(call.weight + (int64_t)panel * words * kPanel);
    const uint8_t* x = call.x + (int64_t)row * call.k;
    int32_t sums[kPanel] = {};
    for (int u = 0; u < words; ++u, weight += kPanel * kWord, x += kWord) {
      for (int i = 0; i < kPanel; ++i) {
        for (int e = 0; e < kWord; ++e) sums[i] += (int32_t)x[e] * weight[i * kWord + e];
      }
    }
    write(row, panel, sums);
  }
#endif
};

template <class T>
void int8_linear(const Int8LinearCall& call) {
  multiply_all(Int8Kernel<T>{call}, call.num_rows, call.n, call.k, call.num_threads);
}

}  // namespace carousel

CAROUSEL_EXPORT void carousel_quantize_rows(const carousel::QuantizeCall* call) {
  using namespace carousel;
  call->is_bf16 ? quantize_rows<bf16>(*call) : quantize_rows<float>(*call);
}

CAROUSEL_EXPORT void carousel_int8_linear(const carousel::Int8LinearCall* call) {
  using namespace carousel;
  call->is_bf16 ? int8_linear<bf16>(*call) : int8_linear<float>(*call);
}
