// RMSNorm, alone or with the residual addition before it, and the SwiGLU gate. They round where the torch
// versions round. Rows are independent, so their results do not depend on the batch.
#include "simd.h"
#include "team.h"

namespace carousel {

constexpr int64_t kMinParallelSize = 1 << 15;  // elements; below, waking a team costs more than it saves

// The binding mirrors both field by field.
struct NormCall {
  const void* x;   // [tokens, heads, size], tokens token_stride apart
  void* residual;  // [tokens, size] with heads 1: x is added to it in place, and the sum is normed; or null
  const void* weight;  // [size]
  void* out;           // [tokens, heads, size]
  int64_t token_stride;
  int32_t tokens;
  int32_t heads;
  int32_t size;
  int32_t is_bf16;
  int32_t num_threads;
  float eps;
};

struct GateCall {
  const void* gate_up;  // [rows, 2 * size]
  void* out;            // [rows, size]
  int32_t rows;
  int32_t size;
  int32_t is_bf16;
  int32_t num_threads;
};

template <class T>
void norm_row(const T* x, T* residual, const T* weight, int size, float eps, T* out) {
  vfloat squares = {};
  for (int c = 0; c < size; c += kLanes) {
    vfloat value = load(x + c);
    if (residual) {
      value = rounded_to<T>(load(residual + c) + value);
      store(residual + c, value);
    }
    squares += value * value;
  }
  const T* from = residual ? residual : x;
  const float scale = 1.0f / std::sqrt(sum_of(squares) / size + eps);
  for (int c = 0; c < size; c += kLanes) {
    store(out + c, rounded_to<T>(load(from + c) * scale) * load(weight + c));
  }
}

template <class T>
void norm(const NormCall& call) {
  const int64_t rows = (int64_t)call.tokens * call.heads;
  const int threads = rows * call.size < kMinParallelSize ? 1 : call.num_threads;
  parallel_ranges(threads, (int)rows, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      const int64_t token = row / call.heads;
      const T* x = (const T*)call.x + token * call.token_stride + row % call.heads * call.size;
      T* residual = call.residual ? (T*)call.residual + row * call.size : nullptr;
      norm_row(x, residual, (const T*)call.weight, call.size, call.eps, (T*)call.out + row * call.size);
    }
  });
}

template <class T>
void silu_and_mul(const GateCall& call) {
  const int64_t size = call.size;
  const int threads = call.rows * size < kMinParallelSize ? 1 : call.num_threads;
  parallel_ranges(threads, call.rows, [&](int row, int end) {
    for (; row < end; ++row) {
      const T* gate = (const T*)call.gate_up + row * 2 * size;
      const T* up = gate + size;
      T* out = (T*)call.out + row * size;
      for (int c = 0; c < call.size; c += kLanes) {
        const vfloat x = load(gate + c);
        store(out + c, rounded_to<T>(x / (exp(-x) + 1.0f)) * load(up + c));
      }
    }
  });
}

}  // namespace carousel

CAROUSEL_EXPORT void carousel_rms_norm(const carousel::NormCall* call) {
  using namespace carousel;
  call->is_bf16 ? norm<bf16>(*call) : norm<float>(*call);
}

CAROUSEL_EXPORT void carousel_silu_and_mul(const carousel::GateCall* call) {
  using namespace carousel;
  call->is_bf16 ? silu_and_mul<bf16>(*call) : silu_and_mul<float>(*call);
}
