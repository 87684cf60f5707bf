// Arguments of a linear layer, and the conversion of its sums to outputs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "activation.h"
#include "panels.h"
#include "simd.h"

namespace carousel {

// The binding mirrors it field by field.
struct LinearCall {
  const void* x;              // [num_rows, k]; for int8 in QuantizeCall's form
  const uint32_t* weight;     // packed [n, k]
  const float* x_scale;       // [num_rows], for int8
  const float* weight_scale;  // [n], for int8; zeros up to a multiple of 16
  const int32_t* weight_sum;  // the same: sum of each row's elements
  const void* bias;           // [n], or null
  void* out;                  // [num_rows, n], or [num_rows, n / 2] with a gate
  int32_t num_rows;
  int32_t n;
  int32_t k;
  int32_t dtype;         // of x, weight and bias; for int8 that of the bias and of rounding
  int32_t out_is_float;  // float32 output, whatever the dtype
  int32_t gate;  // 0, or 1 + the Activation of W's first half, which multiplies its second; then out is as x, and n a
                 // multiple of 32
  int32_t is_symmetric;  // for int8: no element of W is -128
  int32_t in_huge_pages;  // W is
  int32_t num_threads;
};

// Number of panels of the output. The last one may have fewer rows of W, followed by zeros.
inline int num_columns(const LinearCall& call) { return ((call.gate ? call.n / 2 : call.n) + kPanel - 1) / kPanel; }

// Writes one row's sums of one panel, all or those from `lane` on, to the output, as T or float32.
template <class T>
inline void write_panel(const LinearCall& call, int row, int panel, int lane, vfloat sum) {
  const int64_t column = panel * kPanel + lane, at = (int64_t)row * call.n + column;
  if (call.bias) sum += load((const T*)call.bias + column);
  if (call.out_is_float) {
    store((float*)call.out + at, sum);
  } else {
    store((T*)call.out + at, sum);
  }
}

// Writes one row's sums of the panel that n does not fill.
template <class T>
inline void write_last_panel(const LinearCall& call, int row, int panel, const float* sums) {
  const int64_t column = panel * kPanel, at = (int64_t)row * call.n + column;
  const int count = call.n - (int)column;
  T bias[kPanel] = {}, rounded[kPanel];
  float wide[kPanel];
  if (call.bias) std::copy_n((const T*)call.bias + column, count, bias);
  for (int lane = 0; lane < kPanel; lane += kLanes) {
    const vfloat sum = load(sums + lane) + load(bias + lane);
    store(wide + lane, sum);
    store(rounded + lane, sum);
  }
  if (call.out_is_float) {
    std::copy_n(wide, count, (float*)call.out + at);
  } else {
    std::copy_n(rounded, count, (T*)call.out + at);
  }
}

// Output of consecutive rows and two panels: a panel and the next one, or with a gate the same panel of both
// halves.
template <class T>
class PairWriter {
 public:
  PairWriter(const LinearCall& call, int row, int panel)
      : bias_(call.bias ? (const T*)call.bias + panel * kPanel : nullptr),
        right_bias_(bias_ ? bias_ + (call.gate ? call.n / 2 : kPanel) : nullptr),
        gate_(call.gate),
        is_float_(call.out_is_float),
        stride_((int64_t)(call.gate ? call.n / 2 : call.n) * (is_float_ ? sizeof(float) : sizeof(T))),
        out_((char*)call.out + row * stride_ + panel * kPanel * (is_float_ ? sizeof(float) : sizeof(T))) {}

  // Takes the next row's sums.
  void write(const float* left, const float* right) {
    for (int lane = 0; lane < kPanel; lane += kLanes) write(lane, load(left + lane), load(right + lane));
    out_ += stride_;
  }

 private:
  void write(int lane, vfloat left, vfloat right) {
    if (bias_) {
      left += load(bias_ + lane);
      right += load(right_bias_ + lane);
    }
    if (gate_) {
      store((T*)out_ + lane, through_gate(rounded_to<T>(left), rounded_to<T>(right)));
    } else if (is_float_) {
      store((float*)out_ + lane, left);
      store((float*)out_ + kPanel + lane, right);
    } else {
#if defined(__AVX512BF16__)
      if constexpr (std::is_same_v<T, bf16>) {
        _mm512_storeu_si512(out_, (__m512i)_mm512_cvtne2ps_pbh((__m512)right, (__m512)left));
        return;
      }
#endif
      store((T*)out_ + lane, left);
      store((T*)out_ + kPanel + lane, right);
    }
  }

  vfloat through_gate(vfloat gate, vfloat up) const {
    switch (gate_ - 1) {
      case kSilu: return gated<T, kSilu>(gate, up);
      case kGelu: return gated<T, kGelu>(gate, up);
      default: return gated<T, kGeluTanh>(gate, up);
    }
  }

  const T* bias_;
  const T* right_bias_;
  int gate_;
  bool is_float_;
  int64_t stride_;
  char* out_;
};

}  // namespace carousel
