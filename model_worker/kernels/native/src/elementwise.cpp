// Norms, alone or with the residual addition before them, activations of feed-forward layers, and scaled or capped
// sums. They round where the torch versions round. Rows are independent, so their results do not depend on the
// batch.
#include <algorithm>

#include "activation.h"
#include "simd.h"
#include "team.h"

namespace carousel {

constexpr int64_t kMinParallelSize = 1 << 15;  // elements; below, waking a team costs more than it saves

// The binding mirrors all of them field by field.
struct NormCall {
  const void* x;   // [tokens, heads, size], tokens token_stride apart
  void* residual;  // [tokens, size] with heads 1: x is added to it in place, and the sum is normed; or null
  const void* weight;  // [size], or [heads, size] with weight_stride size
  const void* bias;    // as weight, or null
  void* out;           // [tokens, heads, size]
  int64_t token_stride;
  int32_t tokens;
  int32_t heads;
  int32_t size;
  int32_t weight_stride;
  int32_t dtype;
  int32_t weight_is_float;
  int32_t centers;  // a layer norm: the mean is subtracted first
  int32_t is_wide;  // weight and bias come before the rounding; otherwise the weight multiplies the rounded value
  int32_t num_threads;
  float eps;
};

struct ActivateCall {
  const void* x;  // [rows, size], or with has_up [rows, 2 * size]: gate, then up
  void* out;      // [rows, size] activation(x), or activation(gate) * up
  int32_t rows;
  int32_t size;
  int32_t has_up;
  int32_t activation;  // kSilu, kGelu, kGeluTanh
  int32_t dtype;
  int32_t num_threads;
};

struct CombineCall {
  const void* x;    // [rows, size]
  const void* add;  // [rows, size], or null
  void* out;        // [rows, size] cap * tanh(x * scale / cap), plus `add`; may be x or add
  int32_t rows;
  int32_t size;
  int32_t dtype;
  int32_t num_threads;
  float scale;
  float cap;  // 0: none
};

// Sums and squares of the values to be normed, which are stored in `residual` if there is one.
template <class T, class W>
void norm_row(const NormCall& call, const T* x, T* residual, const W* weight, const W* bias, T* out) {
  // Read once, because the compiler must assume that `out` and `residual` may alias the call.
  const int size = call.size;
  const bool is_wide = call.is_wide;
  vfloat sum = {}, squares = {};
  for (int c = 0; c < size; c += kLanes) {
    vfloat value = load(x + c);
    if (residual) {
      store(residual + c, load(residual + c) + value);
      value = load(residual + c);
    }
    sum += value;
    squares += value * value;
  }
  const T* from = residual ? residual : x;
  float mean = 0;
  if (call.centers) {
    mean = sum_of(sum) / size;
    squares = vfloat{};
    for (int c = 0; c < size; c += kLanes) {
      const vfloat value = load(from + c) - mean;
      squares += value * value;
    }
  }
  const float scale = 1.0f / std::sqrt(sum_of(squares) / size + call.eps);
  for (int c = 0; c < size; c += kLanes) {
    vfloat y = (load(from + c) - mean) * scale;
    if (!is_wide) y = rounded_to<T>(y);
    y = y * load(weight + c);
    if (bias) y += load(bias + c);
    store(out + c, y);
  }
}

template <class T, class W>
void norm(const NormCall& call) {
  const int64_t rows = (int64_t)call.tokens * call.heads;
  const int threads = rows * call.size < kMinParallelSize ? 1 : call.num_threads;
  parallel_ranges(threads, (int)rows, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      const int64_t token = row / call.heads, head = row % call.heads;
      const T* x = (const T*)call.x + token * call.token_stride + head * call.size;
      T* residual = call.residual ? (T*)call.residual + row * call.size : nullptr;
      const W* weight = (const W*)call.weight + head * call.weight_stride;
      const W* bias = call.bias ? (const W*)call.bias + head * call.weight_stride : nullptr;
      norm_row(call, x, residual, weight, bias, (T*)call.out + row * call.size);
    }
  });
}

template <class T, int activation>
void activate_rows(const ActivateCall& call) {
  const int64_t size = call.size, width = call.has_up ? 2 * size : size;
  const int threads = call.rows * size < kMinParallelSize ? 1 : call.num_threads;
  parallel_ranges(threads, call.rows, [&](int row, int end) {
    for (; row < end; ++row) {
      const T* x = (const T*)call.x + row * width;
      T* out = (T*)call.out + row * size;
      for (int c = 0; c < size; c += kLanes) {
        const vfloat value = load(x + c);
        store(out + c, call.has_up ? gated<T, activation>(value, load(x + size + c)) : activate<activation>(value));
      }
    }
  });
}

template <class T>
void activate_rows(const ActivateCall& call) {
  switch (call.activation) {
    case kSilu: return activate_rows<T, kSilu>(call);
    case kGelu: return activate_rows<T, kGelu>(call);
    default: return activate_rows<T, kGeluTanh>(call);
  }
}

template <class T>
vfloat combine(const CombineCall& call, vfloat x, vfloat add) {
  vfloat y = rounded_to<T>(x * call.scale);
  if (call.cap != 0) y = tanh(y / call.cap) * call.cap;
  return call.add ? rounded_to<T>(y) + add : y;
}

template <class T>
void combine(const CombineCall& call) {
  const int64_t total = (int64_t)call.rows * call.size;
  const int threads = total < kMinParallelSize ? 1 : call.num_threads;
  const T *from = (const T*)call.x, *add = call.add ? (const T*)call.add : from;
  T* to = (T*)call.out;
  const int64_t vectors = total / kLanes;
  parallel_ranges(threads, (int)vectors, [&](int64_t v, int64_t end) {
    for (; v < end; ++v) {
      store(to + v * kLanes, combine<T>(call, load(from + v * kLanes), load(add + v * kLanes)));
    }
  });
  const int64_t done = vectors * kLanes, rest = total - done;
  if (rest == 0) return;
  T x[kLanes] = {}, y[kLanes] = {};
  std::copy_n(from + done, rest, x);
  std::copy_n(add + done, rest, y);
  store(x, combine<T>(call, load(x), load(y)));
  std::copy_n(x, rest, to + done);
}

}  // namespace carousel

CAROUSEL_EXPORT void carousel_norm(const carousel::NormCall* call) {
  using namespace carousel;
  with_dtype(call->dtype, [&](auto element) {
    using T = decltype(element);
    call->weight_is_float ? norm<T, float>(*call) : norm<T, T>(*call);
  });
}

CAROUSEL_EXPORT void carousel_activate(const carousel::ActivateCall* call) {
  using namespace carousel;
  with_dtype(call->dtype, [&](auto element) { activate_rows<decltype(element)>(*call); });
}

CAROUSEL_EXPORT void carousel_combine(const carousel::CombineCall* call) {
  using namespace carousel;
  with_dtype(call->dtype, [&](auto element) { combine<decltype(element)>(*call); });
}
