// Quantisation of rows to int8, and y = x W^T * scales + bias for int8 x and W, whose words are four elements of a
// row (linear_products.h). Sums are int32 and exact, so all paths give the same results.
#include "linear_task.h"

namespace carousel {

constexpr int64_t kMinParallelElements = 1 << 15;

// The binding mirrors it field by field.
struct QuantizeCall {
  const void* x;  // [num_rows, size], size a multiple of 16
  uint8_t* out;   // [num_rows, size], 128 added
  float* scale;   // [num_rows]: largest magnitude of the row / 127
  int32_t num_rows;
  int32_t size;
  int32_t dtype;
  int32_t num_threads;
};

typedef uint8_t vbyte __attribute__((vector_size(kLanes)));
typedef uint8_t vbytes __attribute__((vector_size(kLanes * 4)));

// Lowest byte of each element, in a few instructions, where GCC uses eighteen to thirty for a
// conversion.
inline vbyte low_bytes(vint x) {
#if defined(__AVX512F__)
  return __builtin_convertvector(x, vbyte);
#elif defined(__AVX2__)
  return __builtin_shufflevector((vbytes)x, (vbytes)x, 0, 4, 8, 12, 16, 20, 24, 28);
#elif defined(__SSE2__)
  const vint low = x & 255;
  const auto words = __builtin_ia32_packssdw128(low, low);
  const auto bytes = __builtin_ia32_packuswb128(words, words);
  vbyte first;
  std::memcpy(&first, &bytes, sizeof first);
  return first;
#else
  return __builtin_shufflevector((vbytes)x, (vbytes)x, 0, 4, 8, 12);
#endif
}

// A row with a NaN gets NaN as its scale, and one with an infinity gets infinity, so the result shows it.
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
    const vbyte narrow = low_bytes(quantum);
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

template <class T>
void multiply_int8(const LinearCall& call) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  multiply_all<ByteQuads, uint8_t, T>(call);
#else
#if defined(__AVX2__) && !defined(__AVX512F__)
  if (call.is_symmetric && call.num_rows == 1) {
    return multiply_row<SignedQuads, uint8_t, T>(call, 0);
  }
#elif defined(__SSE2__) && !defined(__AVX2__)
  if (call.num_rows == 1 && call.in_huge_pages) return multiply_row<UpperBytePairs, uint8_t, T>(call, 0);
#endif
  multiply_all<BytePairs, uint8_t, T>(call);
#endif
}

}  // namespace carousel

CAROUSEL_EXPORT void carousel_quantize_rows(const carousel::QuantizeCall* call) {
  using namespace carousel;
  with_dtype(call->dtype, [&](auto element) { quantize_rows<decltype(element)>(*call); });
}

CAROUSEL_EXPORT void carousel_int8_linear(const carousel::LinearCall* call) {
  using namespace carousel;
  with_dtype(call->dtype, [&](auto element) { multiply_int8<decltype(element)>(*call); });
}
