// Operations on rows of a table and on positions: embeddings, gathered rows, rotary angles.
#include <algorithm>
#include <vector>

#include "panels.h"
#include "simd.h"

namespace carousel {

constexpr int64_t kMinParallelBytes = 1 << 18;
constexpr int64_t kMinParallelAngles = 1 << 14;
constexpr double kPi = 3.14159265358979323846;

// The binding mirrors both field by field.
struct TakeCall {
  const void* table;     // [n, row_bytes], packed as panels.h has it or plain
  const int64_t* index;  // [num_rows]
  const float* row_scale;  // [n]: scales of a table of int8, which rows are multiplied by; or null
  void* out;             // [num_rows, row_bytes], or with scales as many elements of dtype
  int64_t row_bytes;     // a multiple of 4
  int32_t num_rows;
  int32_t packed_bytes;  // of a row that are neighbours in a panel; 0: not packed
  int32_t dtype;         // with scales
  int32_t num_threads;
};

struct RotaryCall {
  const int64_t* positions;  // [num_tokens]
  const float* frequencies;  // [half], radians per position
  const float* amplitude;    // [2 * half]; null means 1
  float* out;                // [num_tokens, 2 * half]: cosines, then sines
  int32_t num_tokens;
  int32_t half;
  int32_t num_threads;
};

template <class Word>
void take_packed_row(const TakeCall& call, int row, Word* to) {
  const int64_t words = call.row_bytes / sizeof(Word), id = call.index[row];
  const Word* from = (const Word*)call.table + id / kPanel * kPanel * words + id % kPanel;
  for (int64_t u = 0; u < words; ++u) to[u] = from[u * kPanel];
}

template <class T>
void widen_row(const int8_t* row, int64_t size, float scale, T* to) {
  for (int64_t begin = 0; begin < size; begin += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, size - begin);
    float wide[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) wide[i] = row[begin + i] * scale;
    T narrow[kLanes];
    store(narrow, load(wide));
    std::copy_n(narrow, count, to + begin);
  }
}

inline void take_row(const TakeCall& call, int row, void* to) {
  if (call.packed_bytes == 4) return take_packed_row(call, row, (uint32_t*)to);
  if (call.packed_bytes == 2) return take_packed_row(call, row, (uint16_t*)to);
  std::memcpy(to, (const char*)call.table + call.index[row] * call.row_bytes, call.row_bytes);
}

inline void take_scaled_row(const TakeCall& call, int row) {
  static thread_local std::vector<int8_t> taken;
  taken.resize(call.row_bytes);
  take_row(call, row, taken.data());
  const float scale = call.row_scale[call.index[row]];
  with_dtype(call.dtype, [&](auto element) {
    widen_row(taken.data(), call.row_bytes, scale, (decltype(element)*)call.out + row * call.row_bytes);
  });
}

void take(const TakeCall& call) {
  const int threads = call.num_rows * call.row_bytes < kMinParallelBytes ? 1 : call.num_threads;
  parallel_ranges(threads, call.num_rows, [&](int row, int end) {
    for (; row < end; ++row) {
      if (call.row_scale) {
        take_scaled_row(call, row);
      } else {
        take_row(call, row, (char*)call.out + row * call.row_bytes);
      }
    }
  });
}

// Cosine and sine of a float, correctly rounded except in rare cases. Computed in double, since positions reach
// millions of radians. The series end where their terms are below 1e-9 of a quarter turn.
inline void turn(float angle, float* cosine, float* sine) {
  const double quarters = std::nearbyint((double)angle * (2 / kPi));
  const double r = (double)angle - quarters * (kPi / 2);
  const int quadrant = (int)(int64_t)quarters & 3;
  const double z = r * r;
  const double s =
      ((((z / 362880 - 1.0 / 5040) * z + 1.0 / 120) * z - 1.0 / 6) * z + 1.0) * r;
  const double c =
      ((((-z / 3628800 + 1.0 / 40320) * z - 1.0 / 720) * z + 1.0 / 24) * z - 0.5) * z + 1.0;
  const float a = (float)(quadrant & 1 ? s : c);
  const float b = (float)(quadrant & 1 ? c : s);
  *cosine = quadrant == 1 || quadrant == 2 ? -a : a;
  *sine = quadrant >= 2 ? -b : b;
}

void rotary(const RotaryCall& call) {
  const int threads = (int64_t)call.num_tokens * call.half < kMinParallelAngles ? 1 : call.num_threads;
  parallel_ranges(threads, call.num_tokens, [&](int token, int end) {
    for (; token < end; ++token) {
      const float position = (float)call.positions[token];
      float* out = call.out + (int64_t)token * 2 * call.half;
      for (int i = 0; i < call.half; ++i) turn(position * call.frequencies[i], out + i, out + call.half + i);
      for (int i = 0; call.amplitude && i < 2 * call.half; ++i) out[i] *= call.amplitude[i];
    }
  });
}

}  // namespace carousel

CAROUSEL_EXPORT void carousel_take(const carousel::TakeCall* call) { carousel::take(*call); }

CAROUSEL_EXPORT void carousel_rotary(const carousel::RotaryCall* call) { carousel::rotary(*call); }
